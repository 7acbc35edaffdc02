"""A draft evaluated as it will be used: by decoding, with the real loop and
rule.

Teacher-forced acceptance looks at the text's own prefixes; decoding looks at
the target's, and at what is left after the first refusal.
"""

from collections.abc import Callable

import jax
import numpy as np

from specdec import decode, multihost, sampling
from specdec.benchmark import decoder, metrics
from specdec.types import AcceptanceRule, Drafter, Model, Params, PyTree


def by_decoding(
  target: Model,
  drafter: Drafter,
  rule: AcceptanceRule,
  target_params: PyTree,
  prompts: np.ndarray,
  *,
  new_tokens: int = 64,
  temperature: float = 0.0,
  seed: int = 0,
) -> Callable[[PyTree], dict]:
  """A function from draft weights to what their decoding measures.

  Args:
    prompts: [B, P] ids, all of one length; decoded together.
    new_tokens: of every row; no token ends a text.
  """
  batch, size = prompts.shape

  def measure(draft_params: PyTree) -> dict:
    state = decode.generate(
      target,
      drafter,
      rule,
      Params(target_params, draft_params),
      prompts,
      np.full((batch,), size),
      jax.random.key(seed),
      max_length=size + new_tokens,
      sampling=sampling.settings(batch, temperature),
    )
    decoder.check_finite(state, range(batch))
    found = metrics.acceptance([jax.tree.map(multihost.whole, state.stats)])
    return {
      "tokens_per_pass": found.tokens_per_pass.value,
      "accepted_per_drafted": found.accepted_per_drafted.value,
      "prefix_acceptance": [
        position.value for position in found.prefix_acceptance
      ],
    }

  return measure
