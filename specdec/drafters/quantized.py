"""The target drafts for itself, with its own weights at fewer bits.

The idea behind QuantSpec (arXiv:2502.10424), with the weights alone quantised:
no second model, no training. Invariant: drafts are computed with the KV that
the target committed and write their own into its scratch, where verification,
which runs every layer at full precision, overwrites it. So there is no second
cache, and the text is that of the full-precision target.
"""

import functools

from specdec import draft_shape
from specdec.drafters.sample_model import sample_model
from specdec.types import Context, Drafter, Model, Resume
from specdec.utils.constructors import cached


@cached
def quantized(
  target: Model,
  k: int | None = None,
  *,
  shape: draft_shape.DraftShape | None = None,
) -> Drafter:
  """Drafts with Params.draft, which are the target's at fewer bits.

  They are `layouts.quantize(target_params)` of models/layouts.py, packed if
  those are. Draft tokens are drawn from the warped distribution that it hands
  over, under the sampling settings of the row. It has no state.

  Args:
    target: the very model that verifies.
    k: draft tokens a round, short for shape=draft_shape.chain(k).
    shape: what a draft looks like.

  Raises:
    ValueError: both or neither of k and shape are given, or k < 0; or drafting
      would run more nodes than the tree has: they share the target's scratch
      slots.
  """
  shape = draft_shape.resolve(k, shape)
  draft_shape.check_scratch(shape)
  spec = shape.spec._replace(name="quantized")

  def propose(params, draft_state, context: Context):
    if spec.max_depth == 0:
      return draft_shape.pending_only(context), draft_state
    apply = functools.partial(target.apply, params.draft)
    draft, _, cache, _ = sample_model(
      context, shape, apply, context.target_cache
    )
    return draft._replace(resume=Resume(None, cache.layers)), draft_state

  idle = draft_shape.idle(shape)
  return Drafter(spec, lambda *_: None, propose, lambda *_: None, idle=idle)
