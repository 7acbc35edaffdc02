"""What a block drafter holds, and what its one pass of a round reads."""

from typing import NamedTuple

import jax

from specdec.drafters.heads import projection as projections
from specdec.drafters.heads.block_head import BlockHead
from specdec.drafters.heads.projection import Projection, num_weights
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import WeightFormat
from specdec.types import DrafterCost, PyTree, StepCost, Window

_ENCODER = ("gather", "context_norm")  # and norms of the hidden states


class _Weights(NamedTuple):
  """Numbers of a block's weights by what reads them.

  Tables of which a token reads a row are left out, and so are the weights of
  the block's projection to a vocabulary.

  Attributes:
    block: what the pass of a round reads.
    context: what the update reads: the projection of hidden states, and the
      layers' maps to keys and values.
    successor: what a draft token reads.
    successor_logits: the successor's projection, of which every chip reads its
      part.
  """

  block: int
  context: int
  successor: int
  successor_logits: int


def drafter_cost(
  head: BlockHead, target: TransformerConfig, form: WeightFormat | None = None
) -> DrafterCost:
  """Counts a block's weights by what reads them.

  The pass of a round reads its layers, the map from embeddings and the
  vocabulary projection; the update reads what makes context; every draft token
  the successor. Projection says where the vocabulary projection lies.
  """
  config, has_successor = head.head_config, _has_successor(head)
  net = jax.eval_shape(head.init, jax.random.key(0))
  projection = projections.of(head, target, form)
  weights = _weights(head, net, projection)
  size = projections.item_size(target)
  kv_size = 2 * config.num_kv_heads * config.head_dim  # of a layer
  hidden_size = (1 + len(config.features)) * target.width
  own_size = projection.own_size
  return DrafterCost(
    weight_bytes=own_size * num_weights(net) + projection.copied_bytes,
    position_bytes=size * kv_size * config.num_layers,
    hidden_bytes=size * hidden_size,
    step=_block_pass(head, target, projection, weights),
    update=StepCost(
      bytes=own_size * weights.context,
      flops=2 * weights.context,
      written_bytes=size * kv_size * config.num_layers,
    ),
    update_catch_up=1,  # the pending token had no context yet
    steps=1,
    # A causal block is cut where the draft ends.
    tokens=None if head.causal else head.num_slots(),
    drafts_all=head.causal,
    catch_up=config.block.offset if head.causal else 0,
    level=_successor(head, target, projection, weights)
    if has_successor
    else None,
  )


def _has_successor(head: BlockHead) -> bool:
  return head.head_config.block.successor != "none"


def _candidates(head: BlockHead) -> int:
  """Returns how many tokens of a slot a selector scores; 0 without one."""
  config = head.head_config
  if config.block.successor != "selector":
    return 0
  return min(config.block.candidates, config.vocabulary or head.vocab_size)


def _weights(head: BlockHead, net: PyTree, projection: Projection) -> _Weights:
  config = head.head_config
  successor = net.get("successor", {})
  tables = [net.get("embed_table", {}), successor.get("first", {})]
  rows_read = scored = 0
  if candidates := _candidates(head):
    tables.append(successor["second"])
    rows_read = config.block.rank * (1 + candidates)
  else:
    scored = num_weights([successor.get(x, {}) for x in ("second", "wide")])
  of_successor = num_weights(successor) + num_weights(
    net.get("confidence_head", {})
  )
  of_successor -= num_weights(tables[1:])
  encoder = num_weights(
    [x for name, x in net.items() if name in _ENCODER or "stream" in name]
  )
  keys_values = num_weights(
    [
      net[f"layer_{i}"]["attention"][name]
      for i in range(config.num_layers)
      for name in "kv"
    ]
  )
  elsewhere = num_weights(tables) + of_successor + encoder + projection.own
  return _Weights(
    block=num_weights(net) - elsewhere,
    context=encoder + keys_values,
    successor=of_successor + rows_read - scored,
    successor_logits=scored,
  )


def _block_pass(
  head: BlockHead,
  target: TransformerConfig,
  projection: Projection,
  weights: _Weights,
) -> StepCost:
  """Returns the pass of a round, with what a selector reads of its logits."""
  config, candidates = head.head_config, _candidates(head)
  size = projections.item_size(target)
  kv_bytes = size * 2 * config.num_kv_heads * config.head_dim
  score_flops = 2 * 2 * config.num_heads * config.head_dim
  windows = [config.block.attention(i)[0] for i in range(config.num_layers)]
  num_full = windows.count(None)
  all_reduces = []
  if config.embed == "shared":  # of the anchor, and of a mask token
    embeddings = 1 + (config.block.mask_token >= 0)
    embed_bytes = embeddings / head.num_slots() * size * target.width
    all_reduces.append((1, embed_bytes))
  if candidates:  # of a slot: who they are, their logits
    all_reduces += [(2 * candidates, 4), (1, 4 * candidates)]
  logits = projection.logits()
  if _has_successor(head):  # which takes them as they are
    # Every candidate is a search through all logits of a slot.
    logits = {"split_logits": (1 + candidates) * projection.num_tokens}
  return StepCost(
    bytes=projection.own_size * weights.block,
    flops=2 * weights.block,
    **projection.step_fields(),
    position_bytes=kv_bytes * num_full,
    position_flops=score_flops * num_full,
    windows=tuple((Window(x), kv_bytes, score_flops) for x in windows if x),
    layers=config.num_layers,
    all_reduces=tuple(all_reduces),
    **logits,
  )


def _successor(
  head: BlockHead,
  target: TransformerConfig,
  projection: Projection,
  weights: _Weights,
) -> StepCost:
  """Returns what a draft token takes after the pass of the round."""
  config, size = head.head_config, projection.own_size
  embeds = config.block.successor == "gru" and config.embed == "shared"
  row = projections.item_size(target) * target.width
  return StepCost(
    bytes=size * weights.successor,
    flops=2 * weights.successor,
    split_bytes=size * weights.successor_logits,
    split_flops=2 * weights.successor_logits,
    all_reduces=((1, row),) if embeds else (),
    **projection.logits(gathers=not _candidates(head)),
  )
