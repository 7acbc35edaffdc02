"""Checks that a drafter keeps what decoding relies on.

For whoever adds one: `check_drafter` runs it on small batches and raises
AssertionError with a sentence that names it and the invariant that it breaks.
All of it runs on the real loop or on the functions that the loop calls;
expectations come from autoregressive decoding and from enumeration.
"""

from collections.abc import Callable, Collection, Sequence

import jax
import numpy as np

from specdec.testing import distribution_checks, draft_checks, loop_checks
from specdec.testing.books import Broken
from specdec.testing.trial import Trial
from specdec.types import AcceptanceRule, Drafter, Model, Params, Stats
from specdec.utils import terminal

INVARIANTS = {
  "trace": "calls of one shape are traced once",
  "coupled": "coupled text is autoregressive text",
  "greedy": "greedy rows are greedy text",
  "eos": "rows end at an EOS or at the limit, and then stay as they are",
  "rows": "a row does not depend on its neighbours",
  "slots": "a row does not depend on who was there before",
  "drawn": "it hands over what its tokens were drawn from",
  "state": "its state is that of the committed text",
  "distribution": "text has the target's distribution",
  "copies": "no cache is copied inside the loop",
}
_CHECKS = {
  "trace": loop_checks.check_trace,
  "coupled": loop_checks.check_coupled,
  "greedy": loop_checks.check_greedy,
  "eos": loop_checks.check_eos,
  "rows": loop_checks.check_rows,
  "slots": loop_checks.check_slots,
  "drawn": draft_checks.check_drawn,
  "state": draft_checks.check_state,
  "distribution": distribution_checks.check_distribution,
  "copies": loop_checks.check_copies,
}


def check_drafter(
  make: Drafter | Callable[[], Drafter],
  target: Model,
  params: Params,
  *,
  rules: Sequence[AcceptanceRule] | None = None,
  skip: Collection[str] = (),
  prompts: np.ndarray | None = None,
  draws: int = 2048,
  tolerance: float = 1e-3,
) -> Stats:
  """Checks the INVARIANTS of a drafter, on small batches of one shape, and
  prints a line for each as it is done.

  Args:
    make: the drafter, or a function without arguments that constructs it; two
      calls must then give one drafter (utils.constructors.cached), or a loop
      that constructs it compiles at every turn.
    target: the model that verifies. The smaller the better: with a vocabulary
      of at most 5 every draft is enumerated, so that a round's distribution is
      checked exactly.
    params: weights of target and drafter.
    rules: whose greedy rows are compared; default all of specdec.acceptance
      that the drafter goes with.
    skip: names of INVARIANTS that do not hold by intention: 'state' where
      drafting learns from refused tokens.
    prompts: [32, 9] token ids; default random ones that repeat themselves.
    draws: texts whose distribution is tested.
    tolerance: of probabilities that two computations of one forward pass give.

  Returns:
    Counts [32] of a generation under the coupled rule: whether drafts were
    accepted, and refused, is for the caller to judge.

  Raises:
    AssertionError: names the drafter and the first invariant that it breaks.
    ValueError: an invariant is unknown.
  """
  unknown = {*skip} - {*INVARIANTS}
  if unknown:
    raise ValueError(
      f"no invariant {', '.join(sorted(unknown))}; they are "
      f"{', '.join(INVARIANTS)}"
    )
  trial = Trial(make, target, params, rules, prompts, draws, tolerance)
  for name, invariant in INVARIANTS.items():
    try:
      if name not in skip:
        _CHECKS[name](trial)
    except Broken as broken:
      raise AssertionError(
        f"{trial.drafter.name} breaks {name!r} ({invariant}): {broken.args[0]}"
      ) from None
    outcome = "left out" if name in skip else "holds"
    terminal.report(f"{name:12}  {outcome}: {invariant}")
  return jax.tree.map(np.asarray, trial.coupled.stats)
