"""Counts the experts of a mixture that the tokens of one pass choose."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec.benchmark.metrics import Estimate, mean
from specdec.checkpoints import Checkpoint
from specdec.models import experts
from specdec.models.transformer import Transformer
from specdec.roofline.cost import experts_touched

_STEPS = 200  # of the correlations tried, from 0 to 1


class Count(NamedTuple):
  """Experts of one layer that so many tokens choose, the mean over layers.

  Attributes:
    tokens: of a pass.
    of_one_text: in a row, as a draft of them is verified.
    of_many_texts: of as many texts, at the same position.
  """

  tokens: int
  of_one_text: Estimate
  of_many_texts: Estimate


def routed(
  checkpoint: Checkpoint, rows: Sequence[Sequence[int]], at_once: int
) -> np.ndarray:
  """Returns [layers, B, T, E] bool: whether a token chooses an expert.

  Args:
    rows: B texts of T tokens.
    at_once: texts of one pass.

  Raises:
    ValueError: the model is no mixture, or the texts differ in length.
  """
  config = checkpoint.config
  if not config.num_experts:
    raise ValueError(f"{checkpoint.source} has no experts")
  if len({len(row) for row in rows}) != 1:
    raise ValueError("the texts must have as many tokens each")

  @jax.jit
  def run(params, tokens):
    _, kept = Transformer(config).apply(
      {"params": params}, tokens, None, head=False, mutable=[experts.ROUTES]
    )
    layers = kept[experts.ROUTES]
    in_order = sorted(layers, key=lambda name: int(name.removeprefix("layer_")))
    return [jax.tree.leaves(layers[name])[0] for name in in_order]

  parts = [
    run(checkpoint.params, jnp.asarray(rows[i : i + at_once], jnp.int32))
    for i in range(0, len(rows), at_once)
  ]
  return np.concatenate([np.stack(part) for part in parts], axis=1)


def counts(routes: np.ndarray, sizes: Sequence[int]) -> list[Count]:
  """Counts the experts that are touched, for passes of these sizes.

  Args:
    routes: [layers, B, T, E] bool.
    sizes: tokens of a pass, each at most B and T.

  Raises:
    ValueError: a size is out of range.
  """
  _, texts, length, _ = routes.shape
  for size in sizes:
    if not 1 <= size <= min(texts, length):
      raise ValueError(
        f"{size} tokens of {texts} texts of {length} tokens; give 1 to "
        f"{min(texts, length)}"
      )
  return [
    Count(
      size,
      mean(_touched(routes, size).mean((0, 2))),
      mean(_touched(routes.swapaxes(1, 2), size).mean((0, 1))),
    )
    for size in sizes
  ]


def _touched(routes: np.ndarray, size: int) -> np.ndarray:
  """Returns [layers, B, T // size]: experts that pieces of a row choose."""
  layers, rows, length, count = routes.shape
  pieces = length // size
  routes = routes[:, :, : pieces * size]
  routes = routes.reshape(layers, rows, pieces, size, count)
  return routes.any(3).sum(-1)


def correlation(
  counted: Sequence[Count],
  of: Callable[[Count], Estimate],
  num_experts: int,
  per_token: int,
) -> float | None:
  """Returns the r of Deployment.correlation with the least squared error,
  relative to what was counted; None where passes of one token alone were, of
  which every r is right."""
  if all(x.tokens == 1 for x in counted):
    return None
  rs = np.linspace(0, 1, _STEPS + 1)
  errors = [
    sum(
      (experts_touched(num_experts, per_token, x.tokens, r) / of(x).value - 1)
      ** 2
      for x in counted
    )
    for r in rs
  ]
  return float(rs[np.argmin(errors)])
