"""What a generation begins with, checked before anything is compiled."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import sampling as warp
from specdec.types import (
  AcceptanceRule,
  Array,
  DraftSpec,
  Params,
  Sampling,
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
  if spec.parents is not None and DraftSpec.of(spec.parents)[:2] != spec[:2]:
    raise ValueError(
      f"parents = {spec.parents} of {spec.name} are not the tree of max_nodes "
      f"= {spec.max_nodes} and max_depth = {spec.max_depth}"
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
  for name, value in {"prompt": prompt, **rows}.items():
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
  _check_range("eos_ids", eos_ids, _INT32.min)
  _check_range("max_length", max_length, 1)
  leaves = jax.tree.leaves(inputs._replace(key=None))
  if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    prompt, prompt_length, _, sampling, *rows = inputs
    size = np.shape(prompt)[1]
    _check_range("prompt_length", prompt_length, 1, size)
    inside = np.arange(size) < np.asarray(prompt_length)[:, None]
    _check_range("token id", np.asarray(prompt)[inside], 0, vocab_size - 1)
    for name, value in zip(("limit", "index"), rows):
      _check_range(name, 0 if value is None else value, 0)
    warp.settings(len(inside), **vars(sampling))  # refuses what is out of range

  def int32(x):
    return None if x is None else jnp.asarray(x, jnp.int32)

  inputs = inputs._replace(
    prompt=int32(inputs.prompt),
    prompt_length=int32(inputs.prompt_length),
    limit=int32(inputs.limit),
    index=int32(inputs.index),
  )
  return inputs, int32(eos_ids)
