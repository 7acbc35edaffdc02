"""Committed text in the token ids of a draft model with another tokenizer.

Token-level intersection (TLI, arXiv:2502.05202): the draft draws tokens that
both vocabularies have, and its distribution over them is as good a draft
distribution as any. Committed tokens that it lacks are spelled with several of
its own. Invariant: a common token is spelled with the draft's token of the same
string, so what was drafted and accepted keeps its KV.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec.models.config import TransformerConfig
from specdec.types import Array, Context, Model, PyTree


class TokenMap(NamedTuple):
  """A target's token ids in a draft's; built by checkpoints.common_tokens.

  The target's token t is spelled pieces[start[t]:start[t + 1]], with none if
  the draft's texts have no such token, such as another start of a text.
  """

  to_draft: Array  # [V] the draft's token of the same string; -1: there is none
  start: Array  # [V + 1]
  pieces: Array  # [P] token ids of the draft
  prefix: Array  # [p] token ids that begin every text of the draft
  column: Array | None  # [V] of the draft's logits, any where there is none;
  #                       None: they stand in the target's order (`in_order`)


class MappedWeights(NamedTuple):
  """Params.draft of a draft model with another tokenizer."""

  model: PyTree
  token_map: TokenMap


class DraftText(NamedTuple):
  """The committed text of every row, as the draft spells it."""

  tokens: Array  # [B, S] token ids of the draft
  length: Array  # [B] of all the text, also where that is more than S
  num_read: Array  # [B] committed tokens of the target that are spelled

  @property
  def end(self) -> Array:
    """[B] tokens that lie in the buffer, in 1..S: a row of none has a 0."""
    return jnp.clip(self.length, 1, self.tokens.shape[1])

  @property
  def drafts(self) -> Array:
    """[B] bool: rows that have a text, all of it in the buffer."""
    return (self.length >= 1) & (self.length <= self.tokens.shape[1])


def empty(token_map: TokenMap, batch: int, size: int) -> DraftText:
  """Returns texts of the prefix alone, with room for `size` tokens."""
  prefix = token_map.prefix.astype(jnp.int32)
  tokens = jnp.zeros((batch, size), jnp.int32)
  tokens = tokens.at[:, : len(prefix)].set(prefix)
  length = jnp.full((batch,), len(prefix), jnp.int32)
  return DraftText(tokens, length, jnp.zeros((batch,), jnp.int32))


def read(
  text: DraftText, token_map: TokenMap, context: Context, chunk: int
) -> DraftText:
  """Spells the committed tokens that are not spelled yet, all of them.

  Args:
    chunk: tokens of the target that are spelled at once.
  """
  size = text.tokens.shape[1]
  row = jnp.arange(len(text.length))[:, None]

  def step(text):
    ahead = jnp.arange(chunk, dtype=jnp.int32)
    index = text.num_read[:, None] + ahead[None]  # [B, chunk]
    last = context.tokens.shape[1] - 1
    token = jnp.take_along_axis(
      context.tokens, jnp.minimum(index, last), axis=1
    )
    start = token_map.start[token]
    count = token_map.start[token + 1] - start
    count = jnp.where(index < context.length[:, None], count, 0)
    stop = text.length[:, None] + jnp.cumsum(count, axis=1, dtype=jnp.int32)

    def put(piece, tokens):  # one piece of every token
      slot = jnp.where(piece < count, stop - count + piece, size)
      new = token_map.pieces[start + jnp.where(piece < count, piece, 0)]
      return tokens.at[row, slot].set(new, mode="drop")

    return DraftText(
      jax.lax.fori_loop(0, jnp.max(count), put, text.tokens),
      stop[:, -1],
      jnp.maximum(text.num_read, jnp.minimum(index[:, -1] + 1, context.length)),
    )

  return jax.lax.while_loop(
    lambda text: jnp.any(text.num_read < context.length), step, text
  )


def model_of(draft_model: Model, token_map: TokenMap) -> Model:
  """Returns the draft model with the target's ids at both ends.

  Its tokens must be common ones; logits of tokens that are not are -inf.
  """
  to_draft = token_map.to_draft

  def apply(params, tokens, cache, **options):
    tokens = jnp.maximum(to_draft[tokens], 0)
    output, cache = draft_model.apply(params, tokens, cache, **options)
    if output.logits is not None:
      output = output._replace(logits=spread(output.logits, token_map))
    return output, cache

  return draft_model._replace(apply=apply, vocab_size=len(to_draft))


def spread(logits: Array, token_map: TokenMap) -> Array:
  """[..., V'] over the draft's tokens to [..., V]; -inf where not common."""
  if token_map.column is not None:
    logits = jnp.take(logits, jnp.maximum(token_map.column, 0), axis=-1)
  return jnp.where(token_map.to_draft >= 0, logits, -jnp.inf)


def in_order(
  config: TransformerConfig, params: dict, token_map: TokenMap
) -> tuple[TransformerConfig, dict, TokenMap]:
  """Gives a draft whose vocabulary is the larger one a head of V rows.

  They stand in the target's order, so that no row is read that cannot be drawn,
  and no logits are moved. A draft of the smaller vocabulary, or of integers,
  stays as it is.

  Args:
    params: not packed; or all of them shapes, as those of the token map.
  """
  size = token_map.to_draft.shape[0]
  if config.vocab_size <= size or config.weights is not None:
    return config, params, token_map
  table = params["embed" if config.tied else "head"]["weight"]
  rows = jax.ShapeDtypeStruct((size, config.width), table.dtype)
  if not isinstance(table, jax.ShapeDtypeStruct):
    rows = table[jnp.maximum(token_map.to_draft, 0)]
  config = dataclasses.replace(config, tied=False)
  params = params | {"head": {"weight": rows}}
  return config, params, token_map._replace(column=None)


def num_kept(token_map: TokenMap, tokens: Array, num_accepted: Array) -> Array:
  """[B] accepted draft tokens, tokens [B, D], before the first not common one.

  The draft read another token in that one's place.
  """
  common = (token_map.to_draft[tokens] >= 0).astype(jnp.int32)
  leading = jnp.sum(jnp.cumprod(common, axis=1), axis=1, dtype=jnp.int32)
  return jnp.minimum(num_accepted, leading)
