"""What a block drafter holds, and what its one pass of a round reads."""

import dataclasses

import jax
import jax.numpy as jnp

from specdec.drafters.heads.block_head import BlockHead
from specdec.drafters.heads.draft_head import GROUP
from specdec.models import params
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import WeightFormat
from specdec.types import DrafterCost, PyTree, StepCost, Window

_ENCODER = ("gather", "context_norm")  # and norms of the hidden states


def drafter_cost(
  head: BlockHead, target: TransformerConfig, form: WeightFormat | None = None
) -> DrafterCost:
  """Counts a block's weights by what reads them.

  The pass of a round reads its layers, the map from embeddings and the
  vocabulary projection; the update reads what makes context: the projection of
  hidden states, and the layers' maps to keys and values; every draft token the
  successor. Rows of the target's vocabulary projection count as the target's,
  unless it drafts from a smaller vocabulary: then it holds a copy of them. Of
  a whole vocabulary every chip computes its part (StepCost.split_bytes).
  """
  config = head.head_config
  net = jax.eval_shape(head.init, jax.random.key(0))
  rows, copied, row_size = vocabulary_rows(head, target)
  own, few = own_rows(head)
  turns, follows = 0, config.block.successor != "none"
  size, weight = item_size(target), weight_size(target, form)
  row_size = weight if form and copied else row_size
  embed = [(1, size * target.width)] if config.embed == "shared" else []
  gru = embed if config.block.successor == "gru" else []
  # A block reads the anchor's embedding, and the mask token's if it has one.
  share = (1 + (config.block.mask_token >= 0)) / head.num_slots()
  all_reduces = [(count, share * width) for count, width in embed]
  logits = logits_of(head, spread=not follows)
  successor = dict(net.get("successor", {}))
  table = num_weights(successor.pop("first", {}))  # of which one row is read
  table += num_weights(net.get("embed_table", {}))
  rows_read = 0
  if config.block.successor == "selector":
    table += num_weights(successor.pop("second"))
    turns = min(config.block.candidates, config.vocabulary or head.vocab_size)
    rows_read = config.block.rank * (1 + turns)
    if head.ids is None:  # of every slot: candidates, then their logits
      all_reduces += [(2 * turns, 4), (1, 4 * turns)]
  level = num_weights(successor) + num_weights(net.get("confidence_head", {}))
  encoder = num_weights(
    [x for name, x in net.items() if name in _ENCODER or "stream" in name]
  )
  held = num_weights(net) - table - level - encoder - own
  scored = 0  # weights of a successor that give logits, as `own` do
  if head.ids is None:
    scored = num_weights([successor.get(x, {}) for x in ("second", "wide")])
  level += rows_read - scored
  stored = encoder + sum(
    num_weights([net[f"layer_{i}"]["attention"][name] for name in "kv"])
    for i in range(config.num_layers)
  )
  kv = 2 * config.num_kv_heads * config.head_dim  # of a layer
  scores = 2 * config.num_heads * config.head_dim
  windows = [config.block.attention(i)[0] for i in range(config.num_layers)]
  num_full = windows.count(None)
  hidden = 1 + len(config.features)
  return DrafterCost(
    weight_bytes=weight * num_weights(net) + row_size * copied,
    position_bytes=size * kv * config.num_layers,
    hidden_bytes=size * hidden * target.width,
    step=StepCost(
      bytes=weight * held + row_size * copied,
      flops=2 * (held - few),
      projected_flops=2 * (few + copied),
      split_bytes=weight * own,
      split_flops=2 * own,
      target_bytes=row_size * (rows - copied),
      target_flops=2 * (rows - copied),
      position_bytes=size * kv * num_full,
      position_flops=2 * scores * num_full,
      windows=tuple((Window(x), size * kv, 2 * scores) for x in windows if x),
      layers=config.num_layers,
      all_reduces=tuple(all_reduces),
      # Every candidate is a search through all logits of a slot.
      **{name: (1 + turns) * count for name, count in logits.items()},
    ),
    update=StepCost(
      bytes=weight * stored,
      flops=2 * stored,
      written_bytes=size * kv * config.num_layers,
    ),
    update_catch_up=1,  # the pending token had no context yet
    steps=1,
    # A causal block is cut where the draft ends.
    tokens=None if head.causal else head.num_slots(),
    drafts_all=head.causal,
    catch_up=config.block.offset if head.causal else 0,
    level=None
    if not follows
    else StepCost(
      bytes=weight * level,
      flops=2 * level,
      split_bytes=weight * scored,
      split_flops=2 * scored,
      all_reduces=tuple(gru),
      **logits_of(head),
    ),
  )


def item_size(target: TransformerConfig) -> int:
  """Returns the bytes of a number of a head, which has the target's dtype: of
  its weights, its KV and the hidden states that it keeps."""
  return jnp.dtype(target.dtype).itemsize


def weight_size(target: TransformerConfig, form: WeightFormat | None) -> float:
  """Returns the bytes of a weight of a head's matrices, with its scale."""
  if form is None:
    return item_size(target)
  return dataclasses.replace(form, group=form.group or GROUP).weight_size


def vocabulary_rows(head, target: TransformerConfig) -> tuple[int, int, float]:
  """Returns how many weights of the target's vocabulary projection a DraftHead
  or BlockHead reads, how many it holds a copy of, and the bytes of each."""
  config = head.head_config
  tokens = config.vocabulary or target.vocab_size
  rows = tokens * target.width if config.head == "shared" else 0
  copied = rows if head.ids is not None else 0
  row_size = params.head_weight_size(target)
  if copied and row_size < 2:  # rows of integers are copied as float32
    row_size = 4
  return rows, copied, row_size


def own_rows(head) -> tuple[int, int]:
  """Returns the weights of a vocabulary projection of a head's own: if it is of
  the target's whole vocabulary, and if it is of fewer tokens; else 0."""
  width = head.head_config.width
  if head.head_config.head != "own":
    return 0, 0
  if head.ids is None:
    return head.vocab_size * width, 0
  return 0, len(head.ids) * width


def logits_of(head, spread: bool = True) -> dict[str, int]:
  """Returns the fields of StepCost that say how many logits a token has.

  Of fewer tokens than the target's, every chip computes all of them, and
  gathers its part of the whole vocabulary from them if they are spread.
  """
  if head.ids is None:
    return {"split_logits": head.vocab_size}
  return {
    "logits": len(head.ids),
    "split_logits": head.vocab_size if spread else 0,
  }


def num_weights(net: PyTree) -> int:
  """Returns a head's number of weights, the target's left out."""
  return sum(leaf.size for leaf in jax.tree.leaves(net))
