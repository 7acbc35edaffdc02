"""The target drafts for itself, with its own weights at fewer bits.

The idea behind QuantSpec (arXiv:2502.10424), with the weights alone quantised:
no second model, no training. Invariant: drafts are computed with the KV that
the target committed and write their own into its scratch, where verification,
which runs every layer at full precision, overwrites it. So there is no second
cache, and the text is that of the full-precision target.
"""

import functools

from specdec import draft_shape
from specdec.drafters.sample_model import check_positions, in_scratch
from specdec.types import Drafter, Model, Sparse
from specdec.utils.constructors import cached


@cached
def quantized(
  target: Model,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
  positions: Sparse | None = None,
) -> Drafter:
  """Drafts with Params.draft, which are the target's at fewer bits.

  They are `layouts.quantize(target_params)` of models/layouts.py, packed if
  those are. Draft tokens are drawn from the warped distribution that it hands
  over, under the sampling settings of the row. It has no state.

  Args:
    target: the very model that verifies.
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: what a draft looks like.
    positions: it attends to these alone (drafters.sparse); None: to all.

  Raises:
    ValueError: both or neither of k and shape are given, or k < 0; or drafting
      would run more nodes than the tree has: they share the target's scratch
      slots.
  """
  if positions is not None:
    check_positions(positions)
  options = {} if positions is None else {"sparse": positions}
  return in_scratch(
    "quantized",
    draft_shape.resolve(k, shape),
    lambda params: functools.partial(target.apply, params.draft, **options),
  )
