"""What a generation begins with, checked before anything is compiled."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_tree
from specdec import sampling as warp
from specdec.types import (
  AcceptanceRule,
  Array,
  DraftSpec,
  Model,
  Params,
  Sampling,
  Source,
)

_INT32 = np.iinfo(np.int32)


class Inputs(NamedTuple):
  """The arrays that a generation begins with; `decode.generate` explains."""

  prompt: Array  # [B, P]
  prompt_length: Array  # [B]
  key: Array
  sampling: Sampling
  limit: Array | None = None  # [B]
  index: Array | None = None  # [B]
  source: Source | None = None


def check_source(target: Model, source: Source | None) -> None:
  """Refuses a source for a decoder alone, and an encoder-decoder without one.

  Raises:
    ValueError: says which.
  """
  if target.encode is None and source is not None:
    raise ValueError("the target is a decoder alone: it has no use for source")
  if target.encode is not None and source is None:
    raise ValueError(
      "the target is an encoder-decoder: give source, the tokens that its "
      "encoder reads"
    )


def check_pair(spec: DraftSpec, rule: AcceptanceRule) -> None:
  """Refuses a drafter, by its spec, whose drafts a rule cannot evaluate.

  Raises:
    ValueError: says why.
  """
  if rule.chains_only and not spec.chain:
    raise ValueError(
      f"{rule.name} evaluates chains, and {spec.name} drafts trees: give it "
      "k, or shape=chain(k)"
    )
  if spec.siblings not in rule.siblings:
    why = ""
    if spec.siblings == "deterministic":
      why = (
        ", as it reads the distribution that each draft token was drawn from"
      )
    raise ValueError(
      f"siblings of {spec.name} are {spec.siblings!r}; {rule.name} is right "
      f"for {', '.join(sorted(rule.siblings))}{why}"
    )
  most = rule.most_chains
  if most and spec.siblings == "iid" and not 1 <= spec.num_chains <= most:
    drafts = f"{spec.num_chains} chains" if spec.num_chains else "another tree"
    raise ValueError(
      f"{rule.name} evaluates i.i.d. chains that share only the pending token, "
      f"at most {most}, as float32 carries no more; {spec.name} drafts {drafts}"
    )
  ascending = tuple(sorted(set(spec.widths)))
  if spec.widths != ascending or spec.widths[-1:] != (spec.max_nodes,):
    raise ValueError(
      f"widths = {spec.widths} of {spec.name}; they must ascend and end with "
      f"max_nodes = {spec.max_nodes}"
    )
  if spec.widths[0] < 1:
    raise ValueError(
      f"widths = {spec.widths} of {spec.name}; each must be at least 1"
    )
  branches = spec.max_nodes > 1  # a tree of every draft's own
  if spec.parents is not None:
    parents = np.asarray(spec.parents)
    try:
      draft_tree.levels(parents)
    except ValueError as error:
      raise ValueError(f"the tree of {spec.name}: {error}") from None
    if DraftSpec.of(spec.parents)[:2] != spec[:2]:
      raise ValueError(
        f"parents = {spec.parents} of {spec.name} are not the tree of "
        f"max_nodes = {spec.max_nodes} and max_depth = {spec.max_depth}"
      )
    branches = draft_tree.max_siblings(parents) > 1
  if spec.siblings == "none" and branches:
    raise ValueError(
      f"nodes of {spec.name} have several children: its spec must say how they "
      "are drawn, as siblings = 'iid', 'without_replacement' or 'deterministic'"
    )


def check_shapes(inputs: Inputs) -> None:
  """Refuses inputs whose shapes or types do not fit.

  Raises:
    ValueError: names the first of them.
  """
  prompt = inputs.prompt
  if np.ndim(prompt) != 2 or 0 in np.shape(prompt):
    raise ValueError(
      f"prompt has shape {np.shape(prompt)}; it must be [B, P], B rows of P "
      "token ids"
    )
  batch = np.shape(prompt)[0]
  rows = {
    name: getattr(inputs, name) for name in ("prompt_length", "limit", "index")
  }
  texts = {"prompt": prompt}
  if inputs.source is not None:
    texts["source"], rows["source.length"] = inputs.source
    shape = np.shape(inputs.source.tokens)
    if len(shape) != 2 or 0 in shape or shape[0] != batch:
      raise ValueError(
        f"source has shape {shape}; it must be [{batch}, P], token ids for "
        "each row of the prompt"
      )
  for name, value in {**texts, **rows}.items():
    if value is None:
      continue
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
      raise ValueError(f"{name} is {dtype}; it must be integers")
  rows |= {f"sampling.{name}": x for name, x in vars(inputs.sampling).items()}
  for name, value in rows.items():
    if value is not None and np.shape(value) != (batch,):
      raise ValueError(
        f"{name} has shape {np.shape(value)}; it must be ({batch},), an entry "
        "for each row of the prompt"
      )


def check_weights(params: Params) -> None:
  """Refuses weights of more than 32 bits.

  Raises:
    ValueError: names the first of them.
  """
  for path, leaf in jax.tree.leaves_with_path(params):
    if leaf.dtype.itemsize > 4:
      raise ValueError(
        f"params{jax.tree_util.keystr(path)} is {leaf.dtype}; weights must "
        "have 32 bits or fewer: cast them"
      )


def _check_range(name: str, value, low: int, high: int = _INT32.max) -> None:
  value = np.asarray(value)
  bad = value[(value < low) | (value > high)]
  if bad.size:
    raise ValueError(f"{name} = {bad.flat[0]}; it must be in {low}..{high}")


def _check_text(name: str, tokens, length, vocab_size: int) -> None:
  size = np.shape(tokens)[1]
  _check_range(name, length, 1, size)
  inside = np.arange(size) < np.asarray(length)[:, None]
  _check_range("token id", np.asarray(tokens)[inside], 0, vocab_size - 1)


def checked(
  inputs: Inputs, eos_ids: Sequence[int], max_length: int, vocab_size: int
) -> tuple[Inputs, Array]:
  """Checks what a caller gives; returns its integers as int32 arrays.

  Values are checked outside jit only.

  Returns:
    The inputs and eos_ids [E].

  Raises:
    ValueError: a shape, type or value that does not fit.
  """
  check_shapes(inputs)
  eos_ids = np.asarray(eos_ids) if np.size(eos_ids) else np.zeros(0, np.int32)
  if not np.issubdtype(eos_ids.dtype, np.integer):
    raise ValueError(f"eos_ids is {eos_ids.dtype}; it must be integers")
  if eos_ids.ndim != 1:
    raise ValueError("eos_ids must be a list of token ids")
  _check_range("eos_ids", eos_ids, _INT32.min)
  _check_range("max_length", max_length, 1)
  leaves = jax.tree.leaves(inputs._replace(key=None))
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    _check_text("prompt_length", *inputs[:2], vocab_size)
    if inputs.source is not None:
      _check_text("source.length", *inputs.source, vocab_size)
    for name in ("limit", "index"):
      value = getattr(inputs, name)
      _check_range(name, 0 if value is None else value, 0)
    # Refuses what is out of range.
    warp.settings(len(inputs.prompt), **vars(inputs.sampling))

  def int32(x):
    return None if x is None else jnp.asarray(x, jnp.int32)

  inputs = inputs._replace(
    prompt=int32(inputs.prompt),
    prompt_length=int32(inputs.prompt_length),
    limit=int32(inputs.limit),
    index=int32(inputs.index),
    source=jax.tree.map(int32, inputs.source),
  )
  return inputs, int32(eos_ids)
