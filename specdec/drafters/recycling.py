"""Token recycling: drafts the tokens that the target last thought likely.

Luo et al. (arXiv:2408.08696). A table holds, for every token, the likeliest
successors by the target's logits where it was verified last, refused draft
tokens included; a static tree is drafted by following it. No weights and no
pass. Invariant: a draft is a function of rounds that are over, none of whose
noise writes text to come, so it is deterministic (`log_probs` None). Unlike
others' its state depends on what was drafted, not on committed text alone.
"""

import jax.numpy as jnp
import numpy as np

from specdec import draft_length, draft_shape, draft_tree, sampling
from specdec.types import (
  ANY_CHAIN,
  Array,
  Context,
  Draft,
  Drafter,
  DrafterCost,
  StepCost,
)
from specdec.utils.constructors import cached


def _latest(tokens: Array, valid: Array, preferred: Array) -> Array:
  """Returns which nodes [B, N] write: of equal tokens one, a preferred node
  before others, then the last in level order."""
  num_nodes = tokens.shape[1]
  priority = jnp.arange(num_nodes)[None] + num_nodes * preferred
  same = (tokens[:, :, None] == tokens[:, None, :]) & valid[:, None, :]
  beaten = same & (priority[:, None, :] > priority[:, :, None])
  return valid & ~jnp.any(beaten, axis=-1)


@cached
def recycling(
  vocab_size: int,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
  full: bool = False,
) -> Drafter:
  """Follows a table of successors down a static tree.

  Each row of a batch has a table of its own, [V, most children] int32, which a
  text begins without: until the pending token has been verified once, nothing
  is drafted.

  Args:
    vocab_size: V, of the target.
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: a chain or a static tree. A chain that decides its length does so by
      acceptance at each position: a table says nothing of how sure it is.
    full: a text begins with a table of anything, so that every round has a
      draft: to time rounds.

  Raises:
    ValueError: both or neither of k and shape are given, k < 0, the tree is not
      static, the shape reads distributions, or a node has more children than
      there are tokens.
  """
  shape = draft_shape.resolve(k, shape)
  spec, policy = shape.spec, shape.policy
  if spec.parents is None:
    raise ValueError(
      "recycling drafts chains and static trees: give k, shape=chain(k) or "
      "shape=static(parents)"
    )
  draft_length.check_certainty(policy, "recycling")
  size, depth = spec.max_nodes, spec.max_depth
  parents = np.array(spec.parents, np.int32)
  top = max(1, draft_tree.max_siblings(parents))
  if top > vocab_size:
    raise ValueError(
      f"a node has {top} children, and there are {vocab_size} tokens"
    )
  rank = draft_tree.sibling_rank(parents)
  # Of a tree XLA on CPU would copy the cache from width to width (rule 9).
  widths = tuple(sorted({1, size})) if spec.chain else (size,)
  spec = spec._replace(
    widths=widths if policy is None else spec.widths,
    siblings="deterministic",
    max_external_drafts=ANY_CHAIN if spec.chain else 0,
    name="recycling",
  )

  def init(params, context: Context, prefill_output):
    # -1, -2, ...: unknown; stands for tokens 0, 1, ..., which differ.
    batch = context.length.shape[0]
    entry = jnp.arange(top, dtype=jnp.int32)
    entry = entry if full else -1 - entry
    return jnp.broadcast_to(entry, (batch, vocab_size, top))

  def propose(params, table, context: Context):
    rows = jnp.arange(table.shape[0])[:, None]
    nodes, filled = [context.pending], [jnp.ones_like(context.pending, bool)]
    for level in draft_tree.levels(parents)[1:]:
      above = jnp.concatenate(nodes, axis=1)[:, parents[level]]
      entry = table[rows, above, jnp.asarray(rank[level])[None]]
      nodes.append(jnp.where(entry < 0, -1 - entry, entry))
      filled.append(entry >= 0)
    tokens = jnp.concatenate(nodes, axis=1)
    filled = jnp.concatenate(filled, axis=1)
    if spec.chain:
      count = jnp.sum(jnp.cumprod(filled, axis=1), axis=1, dtype=jnp.int32)
    else:
      count = jnp.where(filled[:, 1], size, 1).astype(jnp.int32)
    certainty = None
    if policy is not None:
      decided, certainty = draft_length.count_levels(
        policy, context, depth, jnp.zeros_like(count), count > 1
      )
      count = jnp.minimum(count, decided)
    return Draft(tokens, None, None, count, certainty=certainty), table

  def update(params, table, context, draft, accept_result, target_output):
    if depth == 0:
      return table
    batch, num_nodes = draft.tokens.shape
    node, step = jnp.arange(num_nodes), jnp.arange(accept_result.path.shape[1])
    committed = accept_result.num_committed[:, None]
    valid = (node[None] < draft.count[:, None]) & (committed > 0)
    on_path = (step[None] < committed)[:, :, None] & (
      accept_result.path[:, :, None] == node[None, None]
    )
    writes = _latest(draft.tokens, valid, jnp.any(on_path, axis=1))
    index = jnp.where(writes, draft.tokens, vocab_size)
    rows = jnp.arange(batch)[:, None]
    likeliest, _ = sampling.top(target_output.logits, top)
    return table.at[rows, index].set(likeliest, mode="drop")

  # Of the logits of all nodes, which `update` reads `top` times.
  logits = top * vocab_size * size / max(depth, 1)
  cost = DrafterCost(
    row_bytes=4.0 * vocab_size * top,
    update=StepCost(logits=int(logits)),
    steps=0,
  )
  return Drafter(spec, init, propose, update, cost)
