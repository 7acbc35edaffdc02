"""Evaluates models by their held-out loss, and drafters by decoding.

Teacher-forced acceptance has the text as prefix; decoding has the target's
output as prefix and, after the first draft token, only accepted draft tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, decode, multihost, sampling
from specdec.benchmark import decoder, metrics
from specdec.checkpoints import Checkpoint
from specdec.models import transformer
from specdec.training import losses
from specdec.training.data import Sequences
from specdec.training.setup import Decoding
from specdec.types import Drafter, Model, Params

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


def acceptance_by_decoding(
  target: Model,
  drafter: Drafter,
  held_out: Sequences,
  decoding: Decoding,
  seed: int = 0,
) -> Callable[[Params], dict]:
  """Builds a function from weights to acceptance measures of decoding.

  Prompts are beginnings of held-out sequences, decoded as one batch by
  rejection sampling; no token ends a row early.

  Returns:
    A function of the weights of target and drafter that returns
    tokens_per_pass, accepted_per_drafted and prefix_acceptance (a list over
    depths).

  Raises:
    ValueError: the prompts are longer than a sequence.
  """
  rows = held_out.evenly_spaced(decoding.prompts)
  if decoding.length > rows.shape[1]:
    raise ValueError(
      f"decoding.length = {decoding.length}; a sequence has {rows.shape[1]} "
      "tokens"
    )
  prompts = rows[:, : decoding.length]

  def measure(params: Params) -> dict:
    state = decode.generate(
      target,
      drafter,
      acceptance.rejection(),
      params,
      prompts,
      np.full((len(prompts),), decoding.length),
      jax.random.key(seed),
      max_length=decoding.length + decoding.new_tokens,
      sampling=sampling.settings(len(prompts), decoding.temperature),
    )
    decoder.check_finite(state, range(len(prompts)))
    stats = metrics.acceptance([jax.tree.map(multihost.whole, state.stats)])
    return {
      "tokens_per_pass": stats.tokens_per_pass.value,
      "accepted_per_drafted": stats.accepted_per_drafted.value,
      "prefix_acceptance": [depth.value for depth in stats.prefix_acceptance],
    }

  return measure
