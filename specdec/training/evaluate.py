"""Evaluates models by their held-out loss, and drafters by decoding.

Teacher-forced acceptance has the text as prefix; decoding has the target's
output as prefix and, after the first draft token, only accepted draft tokens.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import (
  acceptance,
  checkpoints,
  decode,
  draft_shape,
  drafters,
  multihost,
  sampling,
)
from specdec.benchmark import batches, metrics
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.block_head import AnyHead
from specdec.models import transformer
from specdec.sharding import Placement
from specdec.training import data, ngram
from specdec.training.data import Sequences
from specdec.training.objective import language_model
from specdec.training.setup import Decoding
from specdec.types import Drafter, Model, Params, PyTree

_ROWS = 8  # sequences in one pass of `held_out_losses`


def held_out_losses(
  names: Sequence[str], held_out: str, sequence: int, counted: str | None
) -> list[tuple[str, float, float]]:
  """Measures models on a text, and a 3-gram with the first model's tokens.

  Args:
    names: of models, which see pieces of `sequence` tokens.
    held_out: path of the text.
    counted: path of the text whose 3-grams are counted; None: no 3-gram.

  Returns:
    Name, nats a token and bits a byte of each.

  Raises:
    ValueError: a model is an encoder-decoder.
  """
  size = sum(len(text.encode()) for text in data.read_texts(held_out))
  documents = data.read(held_out)
  losses, tokenizers = [], []

  def add(name: str, nats: float, count: int) -> None:
    losses.append((name, nats, nats * count / size / math.log(2)))

  for name in names:
    model = checkpoints.load(fetch(name))
    if model.config.encoder_layers:
      raise ValueError(f"{name} is an encoder-decoder; a text has no sources")
    tokenizers.append(model.tokenizer)
    ids = data.tokenize(documents, model.tokenizer)
    rows = data.Packed(ids, sequence).rows
    objective = jax.jit(language_model(transformer.model(model.config)))
    pieces = [rows[i : i + _ROWS] for i in range(0, len(rows), _ROWS)]
    total = sum(
      float(objective(model.params, None, jnp.asarray(piece))[0]) * len(piece)
      for piece in pieces
    )
    add(name, total / len(rows), len(ids))
  if counted:
    texts = data.read(counted)
    counted_ids, ids = (
      data.tokenize(x, tokenizers[0]) for x in (texts, documents)
    )
    trigram = ngram.Trigram(counted_ids, tokenizers[0].vocab_size)
    add("3-gram", -trigram.log_probs(ids).mean(), len(ids))
  return losses


def check_prompts(held_out: Sequences, decoding: Decoding) -> None:
  """Raises ValueError where the prompts are longer than a sequence."""
  size = held_out.length + 1
  if decoding.length > size:
    raise ValueError(
      f"decoding.length = {decoding.length}; a sequence has {size} tokens"
    )


def acceptance_by_decoding(
  target: Model,
  drafter: Drafter,
  held_out: Sequences,
  decoding: Decoding,
  eos_ids: Sequence[int] = (),
) -> Callable[[Params], dict]:
  """Builds a function from weights to acceptance measures of decoding.

  Prompts are beginnings of held-out sequences, decoded as one batch by
  rejection sampling.

  Args:
    eos_ids: tokens that end a row early.

  Returns:
    A function of the weights of target and drafter that returns
    tokens_per_pass, accepted_per_drafted and prefix_acceptance (a list over
    depths).

  Raises:
    ValueError: the prompts are longer than a sequence.
  """
  rows, source = held_out.evenly_spaced(decoding.prompts), None
  lengths = np.full(len(jax.tree.leaves(rows)[0]), decoding.length)
  if isinstance(rows, data.Pairs):  # of which some are shorter
    lengths = np.minimum(lengths, rows.length)
    rows, source = rows.tokens, rows.source
  check_prompts(held_out, decoding)
  prompts = rows[:, : decoding.length]

  def measure(params: Params) -> dict:
    state = decode.generate(
      target,
      drafter,
      acceptance.rejection(),
      params,
      prompts,
      lengths,
      jax.random.key(0),
      max_length=decoding.length + decoding.new_tokens,
      sampling=sampling.settings(len(prompts), decoding.temperature),
      eos_ids=eos_ids,
      source=source,
    )
    batches.check_finite(state, range(len(prompts)))
    stats = metrics.acceptance([jax.tree.map(multihost.whole, state.stats)])
    return {
      "tokens_per_pass": stats.tokens_per_pass.value,
      "accepted_per_drafted": stats.accepted_per_drafted.value,
      "prefix_acceptance": [depth.value for depth in stats.prefix_acceptance],
    }

  return measure


def head_by_decoding(
  target: Model,
  head: AnyHead,
  held_out: Sequences,
  decoding: Decoding,
  place: Placement | None = None,
) -> Callable[[PyTree, PyTree], dict]:
  """As acceptance_by_decoding, of the weights of target and draft head.

  Args:
    place: of the target, on whose mesh it decodes.
  """
  shape = draft_shape.chain(decoding.k)
  drafter = drafters.from_head(head, target, shape, place)
  measure = acceptance_by_decoding(target, drafter, held_out, decoding)
  return lambda weights, net: measure(
    Params(weights, draft_heads.weights_of(head, net, weights))
  )
