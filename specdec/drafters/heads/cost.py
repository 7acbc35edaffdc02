"""What a trained head holds and what a draft token reads, by tracing it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.extend import core

from specdec import sharding
from specdec.drafters.heads import block_cost
from specdec.drafters.heads import projection as projections
from specdec.drafters.heads.block_head import AnyHead
from specdec.drafters.heads.draft_head import DraftHead, TargetWeights
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.head_kinds import KINDS
from specdec.drafters.heads.projection import num_weights
from specdec.models import attention
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import WeightFormat
from specdec.types import DrafterCost, ModelOutput, StepCost


def drafter_cost(
  draft_head: AnyHead,
  target: TransformerConfig,
  form: WeightFormat | None = None,
  ways: int = 1,
) -> DrafterCost:
  """Counts what a head holds and what its step reads; see block_cost of blocks.

  Projection says where the vocabulary projection lies. Of heads that read other
  weights at every level (Medusa, Hydra) the second level stands for all.

  Args:
    form: of its matrices, if they are integers.
    ways: chips that share out its weights.
  """
  make = block_cost.drafter_cost if draft_head.head_config.block else _by_steps
  cost = make(draft_head, target, form)
  return shared_out(cost, draft_head.head_config, target, ways)


def shared_out(
  cost: DrafterCost, config: HeadConfig, target: TransformerConfig, ways: int
) -> DrafterCost:
  """Returns the cost of a chip of so many that share out a head's matrices.

  A layer's two sums are counted; gathers of what else is computed in parts, as
  of own tables and of maps between widths, are not. Of fewer KV heads than
  chips the maps to K and V are divided like the rest.
  """
  if ways == 1:
    return cost
  kv_ways = sharding.shards(ways, config.layers.num_kv_heads)
  summed = projections.item_size(target) * config.width

  def shared(step: StepCost) -> StepCost:
    sums = ()
    if step.position_flops or step.windows:  # it runs the layers
      sums = ((2 * config.num_layers, summed),)
    return step._replace(
      bytes=step.bytes / ways,
      flops=step.flops / ways,
      position_bytes=step.position_bytes / kv_ways,
      position_flops=step.position_flops / ways,
      written_bytes=step.written_bytes / kv_ways,
      windows=tuple(
        (window, size / kv_ways, flops / ways)
        for window, size, flops in step.windows
      ),
      experts=tuple(
        (size / ways, flops / ways, *rest)
        for size, flops, *rest in step.experts
      ),
      all_reduces=(*step.all_reduces, *sums),
    )

  return dataclasses.replace(
    cost,
    weight_bytes=cost.weight_bytes / ways,
    position_bytes=cost.position_bytes / kv_ways,
    step=shared(cost.step),
    update=cost.update and shared(cost.update),
    level=cost.level and shared(cost.level),
  )


def _by_steps(
  draft_head: AnyHead,
  target: TransformerConfig,
  form: WeightFormat | None,
) -> DrafterCost:
  """Returns the cost of a head that drafts level by level."""
  config = draft_head.head_config
  net, encoded = _shapes(draft_head, target)
  projection = projections.of(draft_head, target, form)
  read, embeds = step_weights(draft_head, target)
  layers, experts = config.layers, ()
  expert = (2 + layers.gated) * layers.width * layers.mlp_width
  routed = config.num_layers * layers.num_experts * expert
  body = read - projection.num_weights - routed
  kv = scores = 0
  size, update = projections.item_size(target), None
  own_size = projection.own_size
  if routed:
    of_one = own_size * expert, 2 * expert
    chosen = layers.num_experts, layers.experts_per_token
    experts = ((*of_one, *chosen),) * config.num_layers
  all_reduces = ((1, size * target.width),) if embeds else ()
  if draft_head.has_kv_cache:
    kv = config.num_layers * layers.kv_size
    scores = config.num_layers * layers.score_size
    rerun = step_weights(draft_head, target, logits=False)[0] - routed
    update = StepCost(
      bytes=own_size * rerun,
      flops=2 * rerun,
      position_bytes=size * kv,
      position_flops=2 * scores,
      experts=experts,
      layers=config.num_layers,
      all_reduces=all_reduces,
    )
  hidden = 1 + len(config.features) + config.exits
  return DrafterCost(
    weight_bytes=own_size * num_weights(net) + projection.copied_bytes,
    row_bytes=size * encoded.shape[-1],
    position_bytes=size * kv,
    hidden_bytes=size * hidden * target.width,
    step=StepCost(
      bytes=own_size * body,
      flops=2 * body,
      **projection.step_fields(),
      position_bytes=size * kv,
      position_flops=2 * scores,
      experts=experts,
      layers=max(1, config.num_layers),
      all_reduces=all_reduces,
      **projection.logits(),
    ),
    update=update,
    steps=1 if config.parallel else None,
    drafts_all=True,
    catch_up=int(config.resets_each_round),
    exit_layer=config.exit_layer,
    exit_head=False,
  )


def _shapes(draft_head: DraftHead, target: TransformerConfig):
  """Of its weights, and of the encoded hidden state of one token."""
  net = jax.eval_shape(draft_head.init, jax.random.key(0))
  hidden = jax.ShapeDtypeStruct((1, 1, target.width), jnp.float32)
  output = ModelOutput(None, hidden, (hidden,) * len(draft_head.features))
  return net, jax.eval_shape(draft_head.encode, net, output)


def step_weights(
  draft_head: DraftHead, target: TransformerConfig, logits: bool = True
) -> tuple[int, bool]:
  """Counts the weights that a draft token but the first of a round reads, the
  rows of the target's head included.

  What `encode` reads once a round and the one row of an embedding are left out;
  so are the target's layers below an exit.

  Args:
    logits: False: only what advances the hidden state and the KV.

  Returns:
    The number, and whether the step reads the target's embeddings, of which
    each chip of a mesh has a part.
  """
  config = draft_head.head_config
  net, given = _shapes(draft_head, target)
  leaves, form = jax.tree.flatten(net)
  tables = [
    path[0].key.startswith("embed_table")
    for path, _ in jax.tree.leaves_with_path(net)
  ]
  own_hidden = KINDS[config.kind].own_hidden
  width = config.width if own_hidden else given.shape[-1]
  exit_hidden = jnp.zeros((1, 1, target.width)) if config.exits else None
  tokens, zero = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
  level = min(1, config.levels - 1)

  def draft_token(embed, head, *leaves):
    net = jax.tree.unflatten(form, leaves)
    target_weights = TargetWeights(embed, head)
    view = attention.view(zero, None, 0, 1)
    hidden = jnp.zeros((1, 1, width))
    stepped, _ = draft_head.step(
      net, target_weights, tokens, hidden, (), view, level, exit_hidden
    )
    if not logits:
      return stepped
    return draft_head.logits(net, target_weights, stepped, level)

  count = config.vocabulary or target.vocab_size
  embed, head = (
    jax.ShapeDtypeStruct((n, target.width), jnp.float32) for n in (1, count)
  )
  jaxpr = jax.make_jaxpr(draft_token)(embed, head, *leaves).jaxpr
  read = {
    v for e in jaxpr.eqns for v in e.invars if not isinstance(v, core.Literal)
  }
  embed, *rest = jaxpr.invars
  whole = [v for v, table in zip(rest, [False, *tables]) if not table]
  held = sum(math.prod(v.aval.shape) for v in whole if v in read)
  return held, embed in read
