"""Returns the DrafterCost of a trained head."""

import jax
import jax.numpy as jnp

from specdec.drafters.heads import size
from specdec.drafters.heads.draft_head import DraftHead
from specdec.models.config import TransformerConfig
from specdec.types import DrafterCost, ModelOutput, StepCost

_SIZE = 4  # bytes of a head's weights, state and KV, which are float32


def drafter_cost(
  draft_head: DraftHead, target: TransformerConfig
) -> DrafterCost:
  """Counts what a head holds and what its step reads, by tracing it.

  Rows of the target's vocabulary projection count as the target's, unless the
  head drafts from a smaller vocabulary: then it holds a copy of its rows. Of
  heads that read other weights at every level (Medusa, Hydra) the second level
  stands for all.
  """
  config = draft_head.head_config
  net = jax.eval_shape(draft_head.init, jax.random.key(0))
  tokens = config.vocabulary or target.vocab_size
  rows = tokens * target.width if config.head == "shared" else 0
  row_size = 4 if target.dtype == "float32" else 2
  copied = rows if draft_head.ids is not None else 0
  own = size.step_weights(draft_head, target) - rows
  kv = scores = 0
  update = None
  if draft_head.has_kv_cache:
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    scores = 2 * config.num_layers * config.num_heads * config.head_dim
    rerun = size.step_weights(draft_head, target, logits=False)
    update = StepCost(
      bytes=_SIZE * rerun,
      flops=2 * rerun,
      position_bytes=_SIZE * kv,
      position_flops=2 * scores,
      layers=config.num_layers,
    )
  hidden = 1 + len(config.features) + config.exits
  return DrafterCost(
    weight_bytes=_SIZE * size.num_weights(net) + row_size * copied,
    row_bytes=_SIZE * _state_width(draft_head, target),
    position_bytes=_SIZE * kv,
    hidden_bytes=_SIZE * hidden * target.width,
    step=StepCost(
      bytes=_SIZE * own + row_size * copied,
      flops=2 * (own + copied),
      target_bytes=row_size * (rows - copied),
      target_flops=2 * (rows - copied),
      position_bytes=_SIZE * kv,
      position_flops=2 * scores,
      logits=tokens,
      layers=max(1, config.num_layers),
    ),
    update=update,
    catch_up=int(config.resets_each_round),
    exit_layer=config.exit_layer,
    exit_head=False,
  )


def _state_width(draft_head: DraftHead, target: TransformerConfig) -> int:
  """Returns the width of the encoded hidden state kept per row."""
  net = jax.eval_shape(draft_head.init, jax.random.key(0))
  hidden = jax.ShapeDtypeStruct((1, 1, target.width), jnp.float32)
  output = ModelOutput(None, hidden, (hidden,) * len(draft_head.features))
  return jax.eval_shape(draft_head.encode, net, output).shape[-1]
