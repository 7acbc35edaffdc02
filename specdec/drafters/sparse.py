"""The target drafts for itself, attending to a fixed part of its KV cache.

MagicDec (arXiv:2408.11049) with StreamingLLM's choice of positions
(arXiv:2309.17453): the first, on which attention rests, and the last. At long
contexts a draft step reads the weights and no more KV than that; verification
reads all. Invariant: as of drafters.quantized, drafts are computed with the KV
that the target committed and write their own into its scratch.
"""

import functools

from specdec import draft_shape
from specdec.drafters.sample_model import check_positions, in_scratch
from specdec.types import Drafter, Model, Sparse
from specdec.utils.constructors import cached


@cached
def sparse(
  target: Model,
  positions: Sparse,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
) -> Drafter:
  """Drafts with the target and `positions` of its KV cache.

  Layers with a window or chunks of their own see what lies in them and in the
  window, and no sinks. Draft tokens
  are drawn from the warped distribution that it hands over. It has no state.

  Args:
    target: the very model that verifies; its `apply` must know `sparse`.
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: what a draft looks like.

  Raises:
    ValueError: as check_positions; both or neither of k and shape are
      given, or k < 0; or drafting would run more nodes than the tree has: they
      share the target's scratch slots.
  """
  check_positions(positions)
  return in_scratch(
    "sparse",
    draft_shape.resolve(k, shape),
    lambda params: functools.partial(
      target.apply, params.target, sparse=positions
    ),
  )
