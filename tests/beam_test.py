"""Beam search against a search of lists, and against itself without drafts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from specdec import (
  beam,
  beam_step,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.models import transformer
from specdec.types import NO_FAULT, TARGET_FAULT, Params, Source

SLOW = pytest.mark.slow
V, LENGTH = 23, 18
CONFIG = dataclasses.replace(learned_kinds.TARGET, vocab_size=V, num_layers=2)
MODEL = transformer.model(CONFIG)
PROMPT = np.random.default_rng(0).integers(0, V, (3, 5))
SIZES = np.array([5, 1, 3])
WIDE = draft_shape.static(
  draft_tree.from_paths([(i,) for i in range(4)] + [(0, 0), (0, 1), (1, 0)]),
  "deterministic",
)


@functools.cache
def params():
  target = learned_kinds.sharpened(
    transformer.init_params(CONFIG, jax.random.key(0)), 4
  )
  draft = jax.tree.map(
    lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), target
  )
  return Params(target, draft)


@functools.cache
def log_probs_after(text):
  """[V] float32 of the target, without a cache."""
  tokens = np.zeros((1, LENGTH), np.int32)
  tokens[0, : len(text)] = text
  return np.asarray(_whole(params().target, tokens))[0, len(text) - 1]


@jax.jit
def _whole(weights, tokens):
  output, _ = MODEL.apply(weights, tokens, None)
  return jax.nn.log_softmax(output.logits)


def reference(prompt, search, eos=(), limit=LENGTH):
  """Beams as lists: (score, text), best first; and whether they finished."""
  width, penalty, early = search
  early = True if width == 1 else early  # greedy decoding
  running, finished = [(0.0, tuple(prompt))], []
  while True:
    options = [
      (score + float(log_prob), (*text, token))
      for score, text in running
      for token, log_prob in enumerate(log_probs_after(text))
    ]
    options.sort(key=lambda option: -option[0])
    options = options[: max(2, 1 + len(eos)) * width]
    length = len(options[0][1])
    ends = [text[-1] in eos or length >= limit for _, text in options]
    size = length - len(prompt)
    for (score, text), end in list(zip(options, ends))[:width]:
      if end:
        finished.append((score / size**penalty, text))
    finished = sorted(finished, key=lambda x: -x[0])[:width]
    if all(ends):
      break
    running = [x for x, end in zip(options, ends) if not end][:width]
    if len(finished) == width:
      ahead = size
      if early == "never" and penalty > 0:
        ahead = limit - len(prompt)
      hope = running[0][0] / ahead**penalty
      if early is True or hope <= finished[-1][0]:
        break
  return finished


def found(search, drafter=None, eos=(), limit=None, **options):
  given = {} if drafter is None else {"drafter": drafter}
  return beam.beam_search(
    MODEL,
    params(),
    jnp.asarray(PROMPT),
    jnp.asarray(SIZES),
    search,
    max_length=LENGTH,
    eos_ids=eos,
    limit=limit,
    **given,
    **options,
  )


def same_as_reference(beams, search, eos=(), limits=(LENGTH,) * 3):
  best = beams.best
  for row, (prompt, size) in enumerate(zip(PROMPT, SIZES)):
    expected = reference(prompt[:size].tolist(), search, eos, limits[row])
    assert int(best.done[row].sum()) == len(expected)
    for i, (score, text) in enumerate(expected):
      length = int(best.length[row, i])
      assert tuple(best.tokens[row, i, :length].tolist()) == text
      assert float(best.scores[row, i]) == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(
  "search, eos",
  [
    *((beam.Search(width), (2,)) for width in (1, 3, 8)),
    *(
      pytest.param(beam.Search(width), (2,), marks=SLOW)
      for width in (2, 4, 5, 6, 7)
    ),
    (beam.Search(7, 0.6, "never"), (2, 7)),
    (beam.Search(3), ()),
    (beam.Search(2), (2, 5)),
    *(
      (beam.Search(3, penalty, early), (2, 7))
      for penalty in (-0.5, 0.0, 0.6, 2.0)
      for early in (False, True, "never")
    ),
  ],
  ids=str,
)
def test_plain_search_is_that_of_lists(search, eos):
  same_as_reference(found(search, eos=eos), search, eos)


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 2.0])
def test_one_beam_is_greedy_decoding(penalty, early):
  best = found(beam.Search(1, penalty, early), eos=(2, 7)).best
  texts = decode.autoregress(
    MODEL,
    params(),
    jnp.asarray(PROMPT),
    jnp.asarray(SIZES),
    jax.random.key(0),
    max_length=LENGTH,
    sampling=sampling.settings(3, 0.0),
    eos_ids=(2, 7),
  )
  np.testing.assert_array_equal(best.length[:, 0], texts.length)
  np.testing.assert_array_equal(best.tokens[:, 0], texts.tokens)
  assert (np.asarray(texts.length) < LENGTH).any()  # an end token came


def drafter_of(name):
  return {
    "chain": lambda: drafters.model(MODEL, 3),
    "tree": lambda: drafters.model(MODEL, shape=WIDE),
    "dynamic": lambda: drafters.model(
      MODEL, shape=draft_shape.dynamic(3, 3, 9)
    ),
    "exit": lambda: drafters.early_exit(MODEL, 1, shape=WIDE),
    "lookup": lambda: drafters.lookup(3, ngram=2, min_ngram=1),
    "quantized": lambda: drafters.quantized(MODEL, 2),
  }[name]()


def cases():
  """Each drafter with a search, two of them with every search; more is slow."""
  usual = beam.Search(3, 0.6, True)
  for name in ("chain", "tree", "dynamic", "exit", "lookup", "quantized"):
    for search in (beam.Search(1), usual, beam.Search(8, 1.5)):
      quick = search is usual or name in ("chain", "dynamic")
      yield pytest.param(name, search, marks=() if quick else SLOW)


@pytest.mark.parametrize("name, search", [*cases()], ids=str)
def test_no_drafter_changes_a_beam(name, search):
  limit = jnp.array([LENGTH, 9, 13])
  plain = found(search, eos=(2,), limit=limit)
  drafted = found(search, drafter_of(name), eos=(2,), limit=limit)
  for ours, theirs in zip(
    jax.tree.leaves(drafted.best), jax.tree.leaves(plain.best)
  ):
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
  same_as_reference(drafted, search, (2,), limit.tolist())
  rounds = [int(x.state.stats.widths.sum()) for x in (drafted, plain)]
  assert rounds[0] <= rounds[1]
  if name in ("tree", "dynamic") or (search.width == 1 and name == "chain"):
    assert rounds[0] < rounds[1]


def test_a_row_ends_for_itself_and_does_not_depend_on_the_others():
  search, drafter = beam.Search(3), drafter_of("dynamic")
  together = found(search, drafter, eos=(2, 5)).best
  for row, (prompt, size) in enumerate(zip(PROMPT, SIZES)):
    alone = beam.beam_search(
      MODEL,
      params(),
      jnp.asarray(prompt[None]),
      jnp.asarray([size]),
      search,
      max_length=LENGTH,
      drafter=drafter,
      eos_ids=(2, 5),
    ).best
    for ours, theirs in zip(jax.tree.leaves(alone), jax.tree.leaves(together)):
      np.testing.assert_allclose(ours[0], theirs[row], atol=1e-5)


@pytest.mark.parametrize("size", [10, 128, 1000, 1281])
def test_the_largest_in_order_and_the_first_of_equal_ones(size):
  x = np.random.default_rng(0).integers(0, 50, (3, size)).astype(np.float32)
  x[1] = 7
  x[2, : size // 2] = -np.inf
  values, index = beam_step.largest(jnp.asarray(x), 5)
  expected = np.argsort(-x, axis=1, kind="stable")[:, :5]
  np.testing.assert_array_equal(index, expected)
  np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


def test_long_caches_are_permuted_in_blocks():
  search = beam.Search(3, 0.8)
  short = found(search, drafter_of("tree"), eos=(2,)).best
  long = beam.beam_search(
    MODEL,
    params(),
    jnp.asarray(PROMPT),
    jnp.asarray(SIZES),
    search,
    max_length=700,
    drafter=drafter_of("tree"),
    eos_ids=(2,),
    limit=jnp.full((3,), LENGTH),
  ).best
  np.testing.assert_array_equal(long.tokens[..., :LENGTH], short.tokens)
  np.testing.assert_allclose(long.scores, short.scores, atol=1e-4)


@pytest.mark.slow
def test_an_encoder_decoder():
  config = learned_kinds.T5
  model, weights = learned_kinds.target("t5")
  source = Source(
    jnp.asarray(np.random.default_rng(1).integers(0, 17, (2, 6))),
    jnp.array([6, 2]),
  )
  results = [
    beam.beam_search(
      model,
      Params(weights, weights),
      jnp.zeros((2, 1), jnp.int32),
      jnp.ones((2,), jnp.int32),
      beam.Search(3),
      max_length=16,
      eos_ids=(1,),
      source=source,
      **options,
    )
    for options in ({}, {"drafter": drafters.model(model, shape=WIDE)})
  ]
  plain, drafted = (x.best for x in results)
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)
  np.testing.assert_allclose(drafted.scores, plain.scores, atol=1e-4)
  rounds = [int(x.state.stats.widths.sum()) for x in results]
  assert rounds[1] < rounds[0] and config.encoder_layers


@pytest.mark.parametrize(
  "search, sentence",
  [
    (beam.Search(0), "width = 0; it must be >= 1"),
    (beam.Search(2, 1.0, "maybe"), "early_stopping = 'maybe'; accepted: False"),
    (beam.Search(2, 1.0, 1), "early_stopping = 1; accepted: False"),
    (beam.Search(2, math.nan), "length_penalty = nan; it must be finite"),
    (beam.Search(12), "a step of 12 beams weighs 24 continuations; the vocab"),
  ],
)
def test_what_cannot_be_searched_is_refused(search, sentence):
  with pytest.raises(ValueError, match=sentence):
    found(search)


def test_scores_are_sums_of_log_probabilities():
  """Of the running beams at the end too, which the state's log_probs add up
  to."""
  beams = found(beam.Search(2), drafter_of("tree"))
  state, running = beams.state, np.asarray(beams.scores)
  total = np.asarray(state.log_probs).reshape(3, 2, -1).sum(axis=-1)
  np.testing.assert_allclose(total, running, atol=1e-4)
  texts = np.asarray(state.tokens).reshape(3, 2, -1)

  def exact(text, size):
    return sum(
      log_probs_after(tuple(text[:n]))[text[n]] for n in range(size, LENGTH)
    )

  for row, size in enumerate(SIZES):
    for i in range(2):
      best = beams.best.tokens[row, i].tolist()
      score = float(beams.best.scores[row, i]) * (LENGTH - size)
      assert math.isclose(score, exact(best, size), abs_tol=1e-3)
      sum_of_running = exact(texts[row, i].tolist(), size)
      assert math.isclose(running[row, i], sum_of_running, abs_tol=1e-3)


def test_other_state_of_a_drafter_has_its_rows_first():
  drafter = drafter_of("tree")
  init = drafter.init
  wrong = drafter._replace(
    init=lambda *args: {"own": init(*args), "seen": jnp.zeros((2, 3))},
    propose=lambda params, state, context: (
      drafter.propose(params, state["own"], context)[0],
      state,
    ),
    update=lambda params, state, *rest: state,
  )
  with pytest.raises(ValueError, match=r"model\['seen'\] has the shape \(2, 3"):
    found(beam.Search(3), wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_prompt_stops_before_a_distribution_that_is_not_finite(value):
  def apply(weights, tokens, cache, **options):
    output, written = MODEL.apply(weights, tokens, cache, **options)
    if output.logits is None:
      return output, written
    position = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    broken = (position >= 9) & (jnp.arange(9) // 3 == 1)[:, None]
    logits = jnp.where(broken[..., None], value, output.logits)
    return output._replace(logits=logits), written

  healthy = found(beam.Search(3)).best
  drafter = drafter_of("chain")
  for options in ({}, {"drafter": drafter}):
    beams = beam.beam_search(
      MODEL._replace(apply=apply),
      params(),
      jnp.asarray(PROMPT),
      jnp.asarray(SIZES),
      beam.Search(3),
      max_length=LENGTH,
      **options,
    )
    fault = np.asarray(beams.state.fault).reshape(3, 3)
    assert fault.tolist() == [
      [x] * 3 for x in (NO_FAULT, TARGET_FAULT, NO_FAULT)
    ]
    length = np.asarray(beams.state.length).reshape(3, 3)
    assert length.tolist() == [[LENGTH] * 3, [10] * 3, [LENGTH] * 3]
    assert not beams.best.done[1].any()
    assert np.isfinite(beams.best.scores).all()
    for row in (0, 2):
      np.testing.assert_array_equal(beams.best.tokens[row], healthy.tokens[row])
