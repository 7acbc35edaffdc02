"""One drafter where it has a draft token, another where it has none.

As prompt lookup ahead of a learned drafter: copies are drafted without a pass
and go on for long where text repeats itself, and the other drafts the rest.
Invariant: who drafts a row is known before anything is drawn, so what a row
does not take was never part of its draft, and its distribution is exact
(rule 7).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec import draft_tree
from specdec.types import (
  Array,
  Context,
  Draft,
  Drafter,
  DraftSpec,
  Params,
  PyTree,
  Resume,
)
from specdec.utils import loops
from specdec.utils.constructors import cached


class Both(NamedTuple):
  """Params.draft, or the state, of two drafters."""

  first: PyTree
  other: PyTree


def _params_of(params: Params) -> Both:
  """Returns the Params of each; what is no `Both` is the second's."""
  parts = params.draft
  if not isinstance(parts, Both):
    parts = Both(None, parts)
  return Both(*(params._replace(draft=part) for part in parts))


@cached
def fallback(first: Drafter, other: Drafter) -> Drafter:
  """Chains of `first`, of `other` in rows where `first` drafts nothing.

  A round in which every row has a draft of `first` does not run `other` at all;
  rows that are done count among them, so a large batch seldom has such rounds.

  Args:
    first: a deterministic chain that reads no hidden states of the target and
      whose `update` uses the accept_result alone, so that it also follows what
      the other drafted: drafters.lookup, drafters.suffix. Where it has weights,
      Params.draft are `Both`.
    other: a chain, whose spec.max_external_drafts are at least as many as
      `first` drafts.

  Raises:
    ValueError: one of them is something else.
  """
  ours, theirs = first.spec, other.spec
  for part in first, other:
    if not part.spec.chain:
      raise ValueError(f"fallback takes chains, and {part.name} drafts trees")
  if ours.siblings != "deterministic" or ours.features is not None:
    raise ValueError(
      "the first drafter must be deterministic and read nothing of the target, "
      f"as lookup; siblings of {first.name} are {ours.siblings!r} and its "
      f"features {ours.features}"
    )
  if ours.classes or theirs.classes:
    raise ValueError(
      "a shape that learns from outcomes, as adaptive, goes with one drafter, "
      f"and there are two: {first.name} and {other.name}"
    )
  if not theirs.max_external_drafts:
    raise ValueError(
      f"{other.name} cannot be the fallback for another: it does not "
      "go on after what that drafted (max_external_drafts); quantized, sparse "
      "and trained heads other than exits can"
    )
  if theirs.max_external_drafts < max(1, ours.max_depth):
    raise ValueError(
      f"{other.name} goes on after {theirs.max_external_drafts} draft tokens "
      f"that it did not draft (max_external_drafts), and {first.name} drafts "
      f"{ours.max_depth}"
    )
  size = max(ours.max_nodes, theirs.max_nodes)
  drafting = (width for width in ours.widths if width > 1)
  spec = DraftSpec.of(
    draft_tree.chain(size),
    tuple(sorted({*drafting, *theirs.widths})),
    siblings=theirs.siblings,
    features=theirs.features,
    name=f"{first.name} | {other.name}",
  )

  def init(params, context: Context, prefill_output):
    ours, theirs = _params_of(params)
    return Both(
      first.init(ours, context, None),
      other.init(theirs, context, prefill_output),
    )

  def propose(params, state: Both, context: Context):
    ours, theirs = _params_of(params)
    copied, before = first.propose(ours, state.first, context)
    has_draft = copied.count > 1

    cache = context.target_cache
    theirs_shape = jax.eval_shape(
      lambda: other.propose(theirs, state.other, context)[0]
    )
    # Of the target's cache, where the other drafts in its scratch.
    layers = () if theirs_shape.resume is None else cache.layers
    all_log_probs = theirs_shape.log_probs
    if all_log_probs is not None:
      all_log_probs = _to(size, jnp.zeros_like(all_log_probs))

    def ask(carry, text):
      (*_, layers), state = carry
      ours = context._replace(tokens=text[0], length=text[1])
      if layers:
        ours = ours._replace(target_cache=cache.replace(layers=layers))
      draft, after = other.propose(theirs, state, ours)
      padded = [
        None if x is None else _to(size, x)
        for x in (draft.tokens, draft.log_probs)
      ]
      layers = () if draft.resume is None else draft.resume.layers
      return (*padded, draft.count, layers), after

    text, wanted = (context.tokens, context.length), jnp.any(~has_draft)
    if other.idle is not None:
      wanted &= ~other.idle(context)
    nothing = _to(size, copied.tokens), all_log_probs, copied.count, layers
    (tokens, all_log_probs, count, layers), after = loops.when(
      wanted, ask, (nothing, state.other), text
    )
    tokens = jnp.where(has_draft[:, None], _to(size, copied.tokens), tokens)
    if all_log_probs is not None:  # a copy is certain of every token
      column = jax.lax.broadcasted_iota(jnp.int32, all_log_probs.shape, 2)
      certain = jnp.where(column == tokens[:, :, None], 0.0, -jnp.inf)
      all_log_probs = jnp.where(
        has_draft[:, None, None], certain, all_log_probs
      )
    count = jnp.where(has_draft, copied.count, count)
    resume = Resume(None, layers) if layers else None
    draft = Draft(tokens, None, all_log_probs, count, resume)
    return draft, Both(before, after)

  def update(params, state: Both, *rest):
    ours, theirs = _params_of(params)
    return Both(
      first.update(ours, state.first, *rest),
      other.update(theirs, state.other, *rest),
    )

  return Drafter(spec, init, propose, update)


def _to(size: int, x: Array) -> Array:
  """[B, N, ...] with nodes out of use after, up to `size`."""
  gap = ((0, 0), (0, size - x.shape[1]), *((0, 0),) * (x.ndim - 2))
  return jnp.pad(x, gap)
