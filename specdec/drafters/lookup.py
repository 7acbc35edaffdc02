"""Prompt lookup: drafts what followed the last few tokens where they stood
before.

Saxena's prompt lookup decoding (2023). It copies from prompt and output alike,
and from an encoder-decoder's source; it has no weights and no state. Invariant:
a draft is a function of committed text and source only, so it is deterministic
(`log_probs` None) and any rule may evaluate it.
"""

import jax
import jax.numpy as jnp

from specdec import draft_length, draft_shape
from specdec.drafters import text_match
from specdec.types import NO_COST, Array, Context, Draft, Drafter
from specdec.utils.constructors import cached

_LONGEST = 64  # tokens of an n-gram: each is compared by code of its own


def _propose_row(
  tokens: Array, length: Array, max_ngram: int, k: int
) -> tuple[Array, Array]:
  """Draft tokens [k] after tokens[:length], and the length of the match."""
  position = jnp.arange(tokens.shape[0])
  matched = text_match.match_lengths(tokens, length, max_ngram)
  longest = jnp.max(matched)
  end = jnp.max(jnp.where(matched == longest, position, -1))  # latest of them
  # A copy that reaches the end of the text goes on from its own beginning, as
  # in LZ77: "ababab" drafts "ababab".
  period = jnp.maximum(length - 1 - end, 1)
  draft_tokens = tokens[end + 1 + jnp.arange(k) % period]
  return draft_tokens, longest


@cached
def lookup(
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
  ngram: int = 5,
  min_ngram: int = 3,
) -> Drafter:
  """Copies k tokens after the latest longest match of the last n-gram.

  Args:
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: a chain; one that decides its length does so by the match.
    ngram: longest match looked for.
    min_ngram: shortest match worth a draft; below it nothing is drafted and the
      round is an autoregressive one. 0 drafts always, with anything.

  Raises:
    ValueError: both or neither of k and shape are given, k < 0, the shape is no
      chain or reads distributions, or the n-grams are out of range.
  """
  shape = draft_shape.resolve(k, shape)
  spec, policy = shape.spec, shape.policy
  if not spec.chain:
    raise ValueError("lookup drafts chains: give k, or shape=chain(k)")
  draft_length.check_certainty(policy, "lookup")
  k = spec.max_depth
  if not 0 <= min_ngram <= ngram or not 1 <= ngram <= _LONGEST:
    raise ValueError(
      f"min_ngram = {min_ngram} and ngram = {ngram}; they must satisfy "
      f"0 <= min_ngram <= ngram and 1 <= ngram <= {_LONGEST}"
    )
  widths = (1, k + 1) if k and min_ngram else (k + 1,)
  widths = widths if policy is None else spec.widths
  spec = spec._replace(widths=widths, siblings="deterministic", name="lookup")

  def propose(params, draft_state, context: Context):
    draft_tokens, longest = jax.vmap(lambda t, n: _propose_row(t, n, ngram, k))(
      *text_match.with_source(context)
    )
    tokens = jnp.concatenate([context.pending, draft_tokens], axis=1)
    matches, certainty = longest >= min_ngram, None
    count = jnp.where(matches, k + 1, 1)
    if policy is not None:
      certainty = jnp.clip(longest - min_ngram, 0, draft_length.CLASSES - 1)
      count, certainty = draft_length.count_levels(
        policy, context, k, certainty, matches
      )
    return Draft(tokens, None, None, count, certainty=certainty), draft_state

  return Drafter(spec, lambda *_: None, propose, lambda *_: None, NO_COST)
