"""Generations of two table models of four tokens, a few rows at a time."""

import jax
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, noise, sampling
from specdec.benchmark.decoder import Decoder
from specdec.testing import table_model
from specdec.types import Params

V = 4
MODEL = table_model.model(V)
PARAMS = Params(
  table_model.init_params(jax.random.key(0), V),
  table_model.init_params(jax.random.key(1), V),
)
PROMPT = np.array([[0, 1, 2], [3, 0, 0], [1, 1, 0], [2, 3, 2]])
LENGTH = np.array([3, 1, 2, 3])


def generate(
  rule,
  drafter=None,
  *,
  rows=slice(None),
  target=MODEL,
  params=PARAMS,
  prompt=PROMPT,
  temperature=1.0,
  decoded=decode.generate,
  **options,
):
  """Decodes some rows; the drafter is by default a model that drafts three."""
  length = LENGTH[rows]
  defaults = {
    "prompt_length": length,
    "key": jax.random.key(5),
    "max_length": 12,
    "sampling": sampling.settings(len(length), temperature),
  }
  return decoded(
    target,
    drafter or drafters.model(MODEL, 3),
    rule,
    params,
    prompt[rows],
    **defaults | options,
  )


ROWS, NEW, SIZE = 3, 9, 5  # of decoders: rows, new tokens, a prompt's buffer


def decoder_of(drafter, rule, model=MODEL, params=PARAMS, rows=ROWS, **options):
  """A decoder of a few rows, by default of the tables."""
  options = {"max_new_tokens": NEW, "temperature": 1.0} | options
  key = jax.random.key(5)
  return Decoder(model, drafter, rule, params, key, rows, SIZE, **options)


def table_decoder(rule=None, drafter=None, **options):
  """One whose drafter is by default a model that drafts three."""
  rule = rule or acceptance.rejection()
  return decoder_of(drafter or drafters.model(MODEL, 3), rule, **options)


@pytest.fixture
def record(monkeypatch):
  """Every (row key, address) that is folded while a program runs."""
  addresses = []
  honest = noise.fold

  def note(keys, *address):
    for row, key in enumerate(keys):
      place = tuple(int(np.broadcast_to(x, len(keys))[row]) for x in address)
      addresses.append((tuple(key.tolist()), place))

  def fold(keys, *address):
    jax.debug.callback(note, jax.random.key_data(keys), *address)
    return honest(keys, *address)

  monkeypatch.setattr(noise, "fold", fold)
  return addresses
