"""Evaluates a drafter during training by speculative decoding.

Teacher-forced acceptance has the text as prefix; decoding has the target's
output as prefix and, after the first draft token, only accepted draft tokens.
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
  """Builds a function from draft weights to acceptance measures of decoding.

  Args:
    prompts: [B, P] ids, decoded as one batch.
    new_tokens: tokens to generate in every row; no token ends a row early.

  Returns:
    A function that returns tokens_per_pass, accepted_per_drafted and
    prefix_acceptance (a list over depths).
  """
  batch, prompt_length = prompts.shape

  def measure(draft_params: PyTree) -> dict:
    state = decode.generate(
      target,
      drafter,
      rule,
      Params(target_params, draft_params),
      prompts,
      np.full((batch,), prompt_length),
      jax.random.key(seed),
      max_length=prompt_length + new_tokens,
      sampling=sampling.settings(batch, temperature),
    )
    decoder.check_finite(state, range(batch))
    stats = metrics.acceptance([jax.tree.map(multihost.whole, state.stats)])
    return {
      "tokens_per_pass": stats.tokens_per_pass.value,
      "accepted_per_drafted": stats.accepted_per_drafted.value,
      "prefix_acceptance": [depth.value for depth in stats.prefix_acceptance],
    }

  return measure
