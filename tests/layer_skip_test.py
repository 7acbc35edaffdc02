"""Layer skip: autoregressive decoding's text for any subset; the skipped never
runs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from four_layers import (
  LAYERS,
  speculate,
  start,
  target,
)
from hlo import products
from learned_kinds import (
  LENGTHS,
  small_chunks,  # noqa: F401, a fixture
)
from specdec import acceptance, draft_shape, drafters, sampling, step
from specdec.drafters import Threshold
from specdec.types import AcceptResult, Params, Skip

SOME = Skip((1,), (1, 2))
UNSURE = Threshold(0.3)


def skipper(name="llama", skip=SOME, k=3, threshold=None):
  return drafters.layer_skip(target(name)[0], skip, k, threshold)


def test_a_draft_that_skips_nothing_is_all_kept():
  """Its scratch, taken for the target's KV, gives the target's very
  distributions.
  """
  drafter = skipper(skip=Skip(), threshold=Threshold(0.0, step=0.0))
  state = speculate("llama", drafter, acceptance.coupled())
  np.testing.assert_array_equal(state.stats.evaluated, state.stats.accepted)
  np.testing.assert_array_equal(state.draft_state.threshold, 0.0)
  longest = np.max(state.stats.rounds)
  np.testing.assert_array_equal(state.stats.widths, [0, 0, longest])


# What runs.


def products_of_a_draft(drafter):
  """Counter[(sublayer or head, tokens a row)] of one draft, by its HLO."""
  model, params = target("llama")
  rule, batch = acceptance.rejection(), 2
  state = start("llama", drafter, rule, slice(2, 4))
  program = jax.jit(
    lambda params, state: step.draft_step(model, drafter, rule, params, state)
  )
  hlo = program.lower(Params(params), state).compile().as_text()
  counts = products(hlo, r"(layer_\d+/(?:mlp/gate|attention/q)|head\.logits)")
  return {(name, rows // batch): n for (name, rows), n in counts.items()}


@pytest.mark.parametrize("skip", [SOME, Skip((0, 3), (0,))])
def test_what_is_skipped_does_not_run(skip):
  kept = [
    f"layer_{i}/{name}"
    for i, (name, left_out) in itertools.product(
      range(LAYERS), (("attention/q", skip.attention), ("mlp/gate", skip.mlp))
    )
    if i not in left_out
  ]
  counts = products_of_a_draft(skipper(skip=skip, k=3))
  assert counts == {(name, 1): 3 for name in [*kept, "head.logits"]}


# The threshold.


def test_a_row_stops_at_its_first_unlikely_token_and_keeps_it():
  """Whatever the temperature, by the draft's distribution before any warp; it
  hands over the one after, of the kept sublayers behind the target's KV."""
  model, params = target("llama")
  rule, k = acceptance.coupled(), 4
  drafter = skipper(k=k, threshold=UNSURE)
  state = start("llama", drafter, rule)
  draft, after = jax.jit(
    lambda p, s: step.draft_step(model, drafter, rule, p, s)
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
  params = Params(target("llama")[1])
  state = start("llama", drafter, acceptance.coupled(), slice(0, 4))
  context = step.context_of(state, 17, acceptance.coupled())
  draft, own = drafter.propose(params, state.draft_state, context)
  draft = draft._replace(count=jnp.array([5, 3, 4, 3]))
  own = own._replace(matchness=jnp.array([1.0, 1.0, 1.0, 0.7]))
  accept_result = AcceptResult(
    None, jnp.array([4, 2, 0, 0]), None, jnp.array([5, 3, 1, 0]), None, None
  )
  found = drafter.update(None, own, context, draft, accept_result, None)
  np.testing.assert_allclose(
    found.threshold, [0.5, 0.499, 0.501, 0.5], rtol=1e-5
  )
  np.testing.assert_allclose(found.matchness, [1.0, 1.0, 0.5, 0.7])
  np.testing.assert_array_equal(found.over, [False, False, False, True])
  # It stays a probability, and a row that is done is not drafted for.
  own = found._replace(threshold=jnp.array([0.0, 0.0, 1.0, 1.0]))
  again = drafter.update(None, own, context, draft, accept_result, None)
  np.testing.assert_array_equal(again.threshold, [0.0, 0.0, 1.0, 1.0])
  draft, _ = drafter.propose(params, again, context)
  np.testing.assert_array_equal(draft.count, [5, 5, 2, 1])


def test_it_compiles_few_widths():
  assert skipper(k=3, threshold=UNSURE).spec.widths == (2, 3, 4)
  assert skipper(k=8, threshold=UNSURE).spec.widths == (2, 3, 5, 9)
  assert skipper(k=0, threshold=UNSURE).spec.widths == (1,)
  assert skipper(k=8).spec.widths == (9,)


# Bad input.


@pytest.mark.parametrize(
  "skip, k, threshold, sentence",
  [
    (Skip(attention=(4,)), 3, None, "skip.attention names layer 4.*in 0..3"),
    (Skip(mlp=(-1,)), 3, None, "skip.mlp names layer -1.*has 4 layers"),
    (SOME, -1, None, "k = -1"),
    (SOME, 3, Threshold(1.5), "threshold start = 1.5"),
    (SOME, 3, Threshold(target=-1), "threshold target = -1"),
  ],
)
def test_what_cannot_be_is_refused(skip, k, threshold, sentence):
  with pytest.raises(ValueError, match=sentence):
    skipper(skip=skip, k=k, threshold=threshold)


def test_a_tree_that_tries_more_than_it_keeps_is_refused():
  shape = draft_shape.dynamic(3, 3, 2)
  for make in (
    lambda: drafters.layer_skip(target("llama")[0], SOME, shape=shape),
    lambda: drafters.early_exit(target("llama")[0], 1, shape=shape),
  ):
    with pytest.raises(ValueError, match="keep more, or try fewer"):
      make()
