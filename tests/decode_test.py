"""The loop: speculation gives autoregressive decoding's text, and tells the
truth.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec import cache as kv
from specdec.models import config, transformer
from specdec.testing import table_model
from specdec.testing.books import check_books
from specdec.types import ACCEPTED, CORRECTION, Params
from texts import forward, frozen, texts

V, L = 5, 26
# Prompts of 1, 2, P tokens and both sides of a chunk's end, at T = 1 and T = 0.
LENGTHS = np.array([1, 2, 3, 4, 5, 8, 9] * 2)
TEMPERATURES = np.repeat([1.0, 0.0], 7)
ROWS = len(LENGTHS)
SLOW = pytest.mark.slow

SMALL = config.TransformerConfig(
  vocab_size=17,
  num_layers=2,
  width=32,
  mlp_width=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv, "CHUNK", 4)
    yield


@functools.cache
def family(name):
  """(model, params) of a target and a draft that often agree."""
  if name == "table":
    model = table_model.model(V)
    target = table_model.init_params(jax.random.key(0), V, 1.5)
    other = table_model.init_params(jax.random.key(1), V, 0.7)
  else:
    model = transformer.model(SMALL)
    target, other = (
      jax.tree.map(lambda x: 4 * x, transformer.init_params(SMALL, key))
      for key in jax.random.split(jax.random.key(0))
    )
  draft = jax.tree.map(lambda t, o: t + 0.3 * o, target, other)
  return model, Params(target, draft)


def prompts(vocab_size):
  rng = np.random.default_rng(0)
  half = rng.integers(0, vocab_size, size=(ROWS // 2, 9))
  half[:, 4:] = half[:, :5]  # something to look up
  return np.concatenate([half, half])


def drafter_of(name, k, kind):
  if kind == "lookup":
    return drafters.lookup(k, ngram=2, min_ngram=1)
  return drafters.model(family(name)[0], k)


def arguments(name, seed=0, temperature=TEMPERATURES):
  model, params = family(name)
  positional = (
    params,
    prompts(model.vocab_size),
    LENGTHS,
    jax.random.key(seed),
  )
  settings = sampling.settings(ROWS, temperature)
  return positional, {"max_length": L, "sampling": settings}


@functools.cache
def baseline(name, seed=0):
  positional, options = arguments(name, seed)
  return decode.autoregress(family(name)[0], *positional, **options)


@functools.cache
def speculative(name, kind, k, rule):
  positional, options = arguments(name)
  return decode.generate(
    family(name)[0],
    drafter_of(name, k, kind),
    getattr(acceptance, rule)(),
    *positional,
    **options,
  )


CASES = [
  ("table", "model", 0),
  ("table", "model", 1),
  ("table", "model", 5),
  ("table", "lookup", 3),
  ("transformer", "model", 3),
  pytest.param("table", "model", 3, marks=SLOW),
  pytest.param("table", "lookup", 0, marks=SLOW),
  pytest.param("table", "lookup", 1, marks=SLOW),
  pytest.param("table", "lookup", 5, marks=SLOW),
  pytest.param("transformer", "model", 0, marks=SLOW),
  pytest.param("transformer", "model", 1, marks=SLOW),
  pytest.param("transformer", "model", 5, marks=SLOW),
  pytest.param("transformer", "lookup", 1, marks=SLOW),
  pytest.param("transformer", "lookup", 3, marks=SLOW),
  pytest.param("transformer", "lookup", 5, marks=SLOW),
]


@pytest.mark.parametrize("name, kind, k", CASES)
def test_b05_b22_b24_coupled_is_autoregressive_decoding(name, kind, k):
  state = speculative(name, kind, k, "coupled")
  assert texts(state) == texts(baseline(name))
  check_books(state, LENGTHS, k if kind == "model" else None)
  if k:
    assert state.stats.accepted.sum() > 0
    assert state.stats.rounds.sum() < baseline(name).stats.rounds.sum()
  check_log_probs(name, kind, state)


@pytest.mark.parametrize(
  "rule", ["rejection", pytest.param("greedy", marks=SLOW)]
)
@pytest.mark.parametrize(
  "name, kind, k",
  [
    ("table", "model", 3),
    pytest.param("table", "lookup", 3, marks=SLOW),
    pytest.param("transformer", "model", 3, marks=SLOW),
    pytest.param("transformer", "lookup", 5, marks=SLOW),
  ],
)
def test_b09_greedy_rows_are_greedy_beside_sampled_ones(name, kind, k, rule):
  state = speculative(name, kind, k, rule)
  cold = TEMPERATURES == 0
  ours, theirs = texts(state), texts(baseline(name))
  for b in np.flatnonzero(cold):
    assert ours[b] == theirs[b]
  check_books(state, LENGTHS, k if kind == "model" else None)
  if rule == "rejection":
    assert any(ours[b] != theirs[b] for b in np.flatnonzero(~cold))
    check_log_probs(name, kind, state)


def check_log_probs(name, kind, state):
  """B24: what was noted while drafting is what one plain pass says."""
  model, params = family(name)
  tokens, length = np.asarray(state.tokens), np.asarray(state.length)
  origin = np.asarray(state.origin)
  settings = sampling.settings(ROWS, TEMPERATURES)
  own = jax.nn.log_softmax(forward(model, params.target, tokens))
  drawn = None
  if kind == "model":
    drawn = sampling.warp(forward(model, params.draft, tokens), settings)
    drawn = np.asarray(drawn)
  for b in range(ROWS):
    places = np.arange(LENGTHS[b], length[b])
    written = tokens[b, places]
    np.testing.assert_allclose(
      np.asarray(state.log_probs)[b, places],
      np.asarray(own)[b, places - 1, written],
      atol=1e-4,
    )
    compared = np.isin(origin[b, places], [ACCEPTED, CORRECTION])
    said = np.asarray(state.draft_log_probs)[b, places]
    if drawn is not None:
      np.testing.assert_allclose(
        said[compared], drawn[b, places - 1, written][compared], atol=1e-4
      )
    else:
      accepted = origin[b, places] == ACCEPTED
      assert np.all(said[accepted] == 0)
      assert np.all(said[compared & ~accepted] == -np.inf)
  assert not np.any(np.isnan(np.asarray(state.log_probs)))


def test_b24_autoregressive_decoding_books():
  for name in ("table", "transformer"):
    check_books(baseline(name), LENGTHS, 0)
    check_log_probs(name, "none", baseline(name))


@pytest.mark.parametrize(
  "rule, k",
  [
    ("rejection", 5),
    pytest.param("coupled", 3, marks=SLOW),
    pytest.param("rejection", 1, marks=SLOW),
    pytest.param("rejection", 3, marks=SLOW),
    pytest.param("coupled", 1, marks=SLOW),
    pytest.param("coupled", 5, marks=SLOW),
  ],
)
def test_b11_b12_the_targets_own_draft_is_always_accepted(rule, k):
  """And the distributions that it hands over are distributions that its tokens
  can come from.
  """
  model, params = family("table")
  drafter, distributions = drafters.model(model, k), []

  def propose(*args):
    draft, draft_state = drafter.propose(*args)
    jax.debug.callback(
      lambda *pair: distributions.append(pair), draft.tokens, draft.log_probs
    )
    return draft, draft_state

  state = decode.generate(
    model,
    drafter._replace(propose=propose),
    getattr(acceptance, rule)(),
    Params(params.target, params.target),
    prompts(V),
    LENGTHS,
    jax.random.key(0),
    max_length=120,
    sampling=sampling.settings(ROWS, TEMPERATURES, 3, 0.95),
  )
  np.testing.assert_array_equal(state.stats.accepted, state.stats.drafted)
  emitted = 120 - LENGTHS
  np.testing.assert_array_equal(state.stats.rounds, -(-emitted // (k + 1)))
  check_books(state, LENGTHS, k)

  jax.effects_barrier()
  assert len(distributions) == int(state.stats.rounds.max())
  for tokens, log_probs in distributions:
    drawn = np.exp(log_probs[:, 1:])
    np.testing.assert_allclose(drawn.sum(-1), 1.0, atol=1e-5)
    assert np.all((drawn > 0).sum(-1) <= 3)
    picked = np.take_along_axis(drawn, tokens[:, 1:, None], -1)
    assert np.all(picked > 0)
    assert np.all(picked[TEMPERATURES == 0] == 1)


def test_b15_sampling_samples_and_one_compilation_serves_all():
  traces = []
  honest, params = family("table")

  def apply(*args, **options):
    traces.append(1)
    return honest.apply(*args, **options)

  target = honest._replace(apply=apply)
  drafter, rule = drafter_of("table", 3, "lookup"), acceptance.rejection()
  rng = np.random.default_rng(0)
  seen, calls = [set() for _ in range(ROWS)], 12
  for seed in range(calls):
    same = seed % 2 == 0
    state = decode.generate(
      target,
      drafter,
      rule,
      params,
      prompts(V) if same else rng.integers(0, V, size=(ROWS, 9)),
      LENGTHS if same else rng.integers(1, 10, size=ROWS),
      jax.random.key(seed),
      max_length=L,
      sampling=sampling.settings(ROWS, TEMPERATURES if same else 0.5),
    )
    if seed == 0:
      once = len(traces)
    for b, text in enumerate(texts(state) if same else ()):
      seen[b].add(text)
  assert len(traces) == once, "it traced again for other prompts"
  assert [len(s) for s in seen] == [calls // 2] * 7 + [1] * 7


def test_b26_one_hot_distributions_give_no_nan():
  model = table_model.model(V)
  step = jnp.where(jnp.eye(V, k=1) + jnp.eye(V, k=1 - V) > 0, 0.0, -jnp.inf)
  logits = jnp.broadcast_to(step[None], (V + 1, V, V))
  start = np.arange(V)[:, None]
  drafter = drafters.model(model, 3)
  for draft, accepted in ((logits, True), (logits[:, ::-1], False)):
    state = decode.generate(
      model,
      drafter,
      acceptance.rejection(),
      Params({"table": logits}, {"table": draft}),
      start,
      np.ones(V, int),
      jax.random.key(0),
      max_length=9,
      sampling=sampling.settings(V, np.array([1.0, 0.3, 0.0, 2.0, 1.0])),
    )
    np.testing.assert_array_equal(state.tokens, (start + np.arange(9)) % V)
    np.testing.assert_array_equal(state.log_probs, np.zeros((V, 9)))
    if accepted:
      np.testing.assert_array_equal(state.stats.accepted, state.stats.drafted)


@pytest.mark.parametrize("kind", ["lookup", pytest.param("model", marks=SLOW)])
def test_stream_is_generate_in_pieces(kind):
  positional, options = arguments("table")
  pieces = decode.stream(
    family("table")[0],
    drafter_of("table", 3, kind),
    acceptance.coupled(),
    *positional,
    every=2,
    **options,
  )
  lengths = []
  for state in pieces:
    last = frozen(state)
    lengths.append(last.length.sum())
  assert lengths[0] == LENGTHS.sum()
  assert np.all(np.diff(lengths) > 0)
  assert len(lengths) > 3
  whole = frozen(speculative("table", kind, 3, "coupled"))
  for name in ("tokens", "length", "log_probs", "origin", "stats", "done"):
    jax.tree.map(
      np.testing.assert_array_equal, getattr(whole, name), getattr(last, name)
    )
