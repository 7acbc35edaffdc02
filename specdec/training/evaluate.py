"""Evaluates models by their held-out loss, and drafters by decoding.

Teacher-forced acceptance has the text as prefix; decoding has the target's
output as prefix and, after the first draft token, only accepted draft tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec import decode, multihost, sampling
from specdec.benchmark import decoder, metrics
from specdec.checkpoints import Checkpoint
from specdec.models import transformer
from specdec.training import losses
from specdec.types import AcceptanceRule, Drafter, Model, Params, PyTree

_ROWS = 8  # sequences in one pass of `held_out_loss`


def held_out_loss(checkpoint: Checkpoint, sequences: np.ndarray) -> float:
  """Returns a model's mean cross-entropy, in nats per token.

  Args:
    sequences: [n, T+1] ids.
  """
  apply = transformer.model(checkpoint.config).apply

  @jax.jit
  def loss(params, tokens):
    logits = apply(params, tokens[:, :-1], None)[0].logits
    log_probs = jax.nn.log_softmax(logits)
    return jnp.mean(losses.cross_entropy(log_probs, tokens[:, 1:]))

  total = 0.0
  for first in range(0, len(sequences), _ROWS):
    piece = sequences[first : first + _ROWS]
    total += float(loss(checkpoint.params, jnp.asarray(piece))) * len(piece)
  return total / len(sequences)


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
