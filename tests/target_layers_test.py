"""Early exit and layer skip: layers of the target draft.

That their text is autoregressive decoding's, whatever layers draft:
conformance_test. Here: from which distributions they draw, that no layer runs
twice and what is skipped never, and the threshold that ends a draft.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo import products
from learned_kinds import (
  BATCH,
  LENGTHS,
  TARGET,
  TEMPERATURES,
  L,
  V,
  arguments,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  start,
  target,
)
from specdec import acceptance, decode, draft_shape, drafters, sampling, step
from specdec.drafters import Threshold
from specdec.types import (
  ACCEPTED,
  CORRECTION,
  AcceptResult,
  Draft,
  DraftSpec,
  Params,
  Resume,
  Skip,
)
from texts import forward, texts

COUPLED, REJECTION = acceptance.coupled(), acceptance.rejection()
LAYERS = TARGET.num_layers
NOTHING, SOME = Skip(), Skip((1,), (1, 2))
UNSURE = Threshold(0.3)


def skipper(skip=SOME, k=3, threshold=None):
  return drafters.layer_skip(target()[0], skip, k, threshold)


def test_an_exit_hands_over_what_it_drew_from():
  """Layers 0 .. E - 1, run autoregressively, give the very distributions that
  were noted.
  """
  model, params = target()
  state = speculate(drafters.early_exit(model, 2, 3), REJECTION)

  def exit_early(params, tokens, cache, **options):
    return model.apply(params, tokens, cache, stop=2, **options)

  shallow = model._replace(apply=exit_early)
  tokens, origin = np.asarray(state.tokens), np.asarray(state.origin)
  settings = sampling.settings(BATCH, TEMPERATURES)
  drawn = np.asarray(sampling.warp(forward(shallow, params, tokens), settings))
  whole = np.asarray(jax.nn.log_softmax(forward(model, params, tokens)))
  for b in range(BATCH):
    places = np.arange(LENGTHS[b], int(state.length[b]))
    written = tokens[b, places]
    compared = np.isin(origin[b, places], [ACCEPTED, CORRECTION])
    for noted, distributions, where in (
      (state.draft_log_probs, drawn, compared),
      (state.log_probs, whole, slice(None)),
    ):
      np.testing.assert_allclose(
        np.asarray(noted)[b, places][where],
        distributions[b, places - 1, written][where],
        atol=1e-4,
      )


def test_a_draft_that_skips_nothing_is_all_kept():
  """Its scratch, taken for the target's KV, gives the target's very
  distributions.
  """
  drafter = skipper(NOTHING, threshold=Threshold(0.0, step=0.0))
  state = speculate(drafter, COUPLED)
  np.testing.assert_array_equal(state.stats.evaluated, state.stats.accepted)
  np.testing.assert_array_equal(state.draft_state.threshold, 0.0)
  longest = np.max(state.stats.rounds)
  np.testing.assert_array_equal(state.stats.widths, [0, 0, longest])


def seer(name, exit_layer, truth):
  """Drafts a tree that holds the target's own text, and resumes from it.

  Every node's first layers run in one pass with a tree mask; the right path is
  0, 1, 4, so committing it moves KV, of resumed layers as of the others. Every
  other round a row has three nodes in use instead of six.
  """
  model, _ = target(name)
  parents = np.array([-1, 0, 0, 1, 1, 2])
  truth = jnp.asarray(truth)
  spec = DraftSpec.of(parents, (3, 6), siblings="deterministic")

  def propose(params, draft_state, context):
    at = context.length[:, None] + jnp.array([[-1, 0, 0, 1, 1, 1]])
    right = jnp.take_along_axis(truth, jnp.minimum(at, L - 1), axis=1)
    tokens = (right + jnp.array([[0, 0, 1, 1, 0, 1]])) % V
    output, cache = model.apply(
      params.target,
      tokens,
      context.target_cache,
      parents=parents,
      stop=exit_layer,
      head=False,
      features=(exit_layer,),
    )
    resume = Resume(output.features[0], cache.layers[:exit_layer])
    count = jnp.where(context.length % 2 == 0, 6, 3)
    return Draft(tokens, None, None, count, resume), draft_state

  undrafted = drafters.early_exit(model, exit_layer, 0)
  return undrafted._replace(spec=spec, propose=propose)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_tree_can_be_resumed_too(name):
  positional, options = arguments(name)
  expected = decode.autoregress(target(name)[0], *positional, **options)
  state = speculate(seer(name, 2, expected.tokens), COUPLED, name=name)
  assert texts(state) == texts(expected)
  assert np.all(np.asarray(state.stats.widths) > 0)  # both were run
  # Nothing that was drafted on the right path was refused.
  assert np.all(np.asarray(state.stats.accepted)[:, 0] > 0)
  np.testing.assert_array_equal(state.stats.evaluated, state.stats.accepted)


# What runs.


def products_of(run, drafter, *more):
  """{(sublayer or head, tokens a row): times} of one draft or round."""
  model, params = target()
  rows = slice(2, 4)
  state = start(drafter, REJECTION, rows=rows)
  program = jax.jit(
    lambda params, state: run(model, drafter, REJECTION, params, state, *more)
  )
  hlo = program.lower(Params(params), state).compile().as_text()
  counts = products(hlo, r"(layer_\d+/(?:mlp/down|attention/o)|head\.logits)")
  size = rows.stop - rows.start
  return {(name, count // size): n for (name, count), n in counts.items()}


def products_of_a_round(drafter):
  return products_of(step.decode_step, drafter, jnp.zeros((0,), jnp.int32))


def sublayers(layers, skip=NOTHING):
  return [
    f"layer_{i}/{name}"
    for i, (name, skipped) in itertools.product(
      layers, (("attention/o", skip.attention), ("mlp/down", skip.mlp))
    )
    if i not in skipped
  ]


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_a_round_runs_no_layer_twice(exit_layer):
  k = 3
  drafter = drafters.early_exit(target()[0], exit_layer, k)
  below, above = range(exit_layer), range(exit_layer, LAYERS)
  assert products_of_a_round(drafter) == {
    **{(name, 1): k + 1 for name in sublayers(below)},
    ("head.logits", 1): k,
    **{(name, k + 1): 1 for name in [*sublayers(above), "head.logits"]},
  }


def test_the_count_sees_a_verification_that_starts_at_the_bottom():
  drafter = drafters.early_exit(target()[0], 2, 3)

  def propose(*arguments):
    draft, draft_state = drafter.propose(*arguments)
    return draft._replace(resume=None), draft_state

  counts = products_of_a_round(drafter._replace(propose=propose))
  assert counts["layer_0/mlp/down", 4] == counts["layer_1/mlp/down", 4] == 1


@pytest.mark.parametrize("skip", [SOME, Skip((0, 2), (0,))])
def test_what_is_skipped_does_not_run(skip):
  names = [*sublayers(range(LAYERS), skip), "head.logits"]
  counts = products_of(step.draft_step, skipper(skip))
  assert counts == {(name, 1): 3 for name in names}


# The threshold.


def test_a_row_stops_at_its_first_unlikely_token_and_keeps_it():
  """Whatever the temperature, by the draft's distribution before any warp; it
  hands over the one after, of the kept sublayers after the target's KV."""
  model, params = target()
  k = 4
  drafter = skipper(k=k, threshold=UNSURE)
  state = start(drafter, COUPLED)
  draft, after = jax.jit(
    lambda p, s: step.draft_step(model, drafter, COUPLED, p, s)
  )(Params(params), state)
  logits = jax.jit(lambda p, t, c: model.apply(p, t, c, skip=SOME)[0].logits)(
    params, draft.tokens, state.target_cache
  )[:, :-1]
  warped = sampling.warp(logits, state.sampling)
  likely = np.take_along_axis(
    np.asarray(jax.nn.softmax(logits)), draft.tokens[:, 1:, None], 2
  )[..., 0]
  for row, count in enumerate(np.asarray(draft.count)):
    drafted = likely[row, : count - 1]
    assert len(drafted) >= 1
    assert np.all(drafted[:-1] >= UNSURE.start)
    assert len(drafted) == k or drafted[-1] < UNSURE.start
    np.testing.assert_allclose(
      draft.log_probs[row, 1:count], warped[row, : count - 1], atol=1e-4
    )
  assert len(set(np.asarray(draft.count).tolist())) > 1
  caches = zip(state.target_cache.layers, after.target_cache.layers)
  for i, ((keys, _), (scratch, _)) in enumerate(caches):
    unused = bool(jnp.array_equal(keys, scratch))
    assert unused == (i in SOME.attention)  # nor is its scratch written
  np.testing.assert_array_equal(after.target_cache.length, LENGTHS - 1)


def test_the_threshold_moves_as_the_paper_says():
  """Four rows: all kept and long, all kept and short, refused, done."""
  drafter = skipper(k=4, threshold=Threshold(0.5))
  params = Params(target()[1])
  state = start(drafter, COUPLED, rows=slice(0, 4))
  context = step.context_of(state, V, COUPLED)
  draft, kept = drafter.propose(params, state.draft_state, context)
  draft = draft._replace(count=jnp.array([5, 3, 4, 3]))
  kept = kept._replace(matchness=jnp.array([1.0, 1.0, 1.0, 0.7]))
  accept_result = AcceptResult(
    None, jnp.array([4, 2, 0, 0]), None, jnp.array([5, 3, 1, 0]), None, None
  )
  after = drafter.update(None, kept, context, draft, accept_result, None)
  np.testing.assert_allclose(
    after.threshold, [0.5, 0.499, 0.501, 0.5], rtol=1e-5
  )
  np.testing.assert_allclose(after.matchness, [1.0, 1.0, 0.5, 0.7])
  np.testing.assert_array_equal(after.over, [False, False, False, True])
  # It stays a probability, and a row that is done is not drafted for.
  kept = after._replace(threshold=jnp.array([0.0, 0.0, 1.0, 1.0]))
  again = drafter.update(None, kept, context, draft, accept_result, None)
  np.testing.assert_array_equal(again.threshold, [0.0, 0.0, 1.0, 1.0])
  draft, _ = drafter.propose(params, again, context)
  np.testing.assert_array_equal(draft.count, [5, 5, 2, 1])


def test_it_compiles_few_widths():
  assert skipper(k=3, threshold=UNSURE).spec.widths == (2, 3, 4)
  assert skipper(k=8, threshold=UNSURE).spec.widths == (2, 3, 5, 9)
  assert skipper(k=0, threshold=UNSURE).spec.widths == (1,)
  assert skipper(k=8).spec.widths == (9,)


# Bad input.


@pytest.mark.parametrize("exit_layer", [0, LAYERS])
def test_exits_outside_the_model_are_refused(exit_layer):
  with pytest.raises(ValueError, match=f"has {LAYERS} layers.*1..2"):
    drafters.early_exit(target()[0], exit_layer, 3)


@pytest.mark.parametrize(
  "skip, k, threshold, sentence",
  [
    (Skip(attention=(3,)), 3, None, "skip.attention names layer 3.*in 0..2"),
    (Skip(mlp=(-1,)), 3, None, "skip.mlp names layer -1.*has 3 layers"),
    (SOME, -1, None, "k = -1"),
    (SOME, 3, Threshold(1.5), "threshold start = 1.5"),
    (SOME, 3, Threshold(target=-1), "threshold target = -1"),
  ],
)
def test_what_cannot_be_is_refused(skip, k, threshold, sentence):
  with pytest.raises(ValueError, match=sentence):
    skipper(skip=skip, k=k, threshold=threshold)


def test_a_tree_that_tries_more_than_it_keeps_is_refused():
  shape = draft_shape.dynamic(3, 3, 4)
  for make in (
    lambda: drafters.layer_skip(target()[0], SOME, shape=shape),
    lambda: drafters.early_exit(target()[0], 1, shape=shape),
  ):
    with pytest.raises(ValueError, match="keep more, or try fewer"):
      make()
