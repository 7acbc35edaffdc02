"""Layer skip: autoregressive decoding's text for any subset; the skipped never
runs.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import text_statistics as distributions
from early_exit_test import LAYERS, LENGTHS, arguments, target
from hlo import products
from specdec import (
  acceptance,
  decode,
  draft_shape,
  drafters,
  sampling,
  step,
)
from specdec import (
  cache as kv,
)
from specdec.drafters import Threshold
from specdec.testing import table_model
from specdec.types import ACCEPTED, CORRECTION, AcceptResult, Params, Skip

SLOW = pytest.mark.slow
SOME = Skip((1,), (1, 2))
NOTHING, ALL = Skip(), Skip(tuple(range(LAYERS)), tuple(range(LAYERS)))
UNSURE = Threshold(0.3)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv, "CHUNK", 4)
    yield


def speculate(name, drafter, rule, rows=slice(None), **more):
  positional, options = arguments(name, rows)
  return decode.generate(
    target(name)[0], drafter, rule, *positional, **(options | more)
  )


def skipper(name="llama", skip=SOME, k=3, threshold=None):
  return drafters.layer_skip(target(name)[0], skip, k, threshold)


def test_a_draft_that_skips_nothing_is_all_kept():
  """Its scratch, taken for the target's KV, gives the target's very
  distributions.
  """
  drafter = skipper(skip=NOTHING, threshold=Threshold(0.0, step=0.0))
  state = speculate("llama", drafter, acceptance.coupled())
  np.testing.assert_array_equal(state.stats.evaluated, state.stats.accepted)
  np.testing.assert_array_equal(state.draft_state.threshold, 0.0)
  longest = np.max(state.stats.rounds)
  np.testing.assert_array_equal(state.stats.widths, [0, 0, longest])


def test_what_it_hands_over_is_what_it_drew_from():
  """The kept sublayers, run autoregressively after the whole target's KV."""
  model, params = target("llama")
  k = 3
  state = speculate("llama", skipper(k=k), acceptance.rejection())
  tokens, length = jnp.asarray(state.tokens), jnp.asarray(LENGTHS)
  drafter = skipper(k=k)
  positional, options = arguments("llama")
  rule = acceptance.rejection()
  started = decode.start(model, drafter, rule, *positional, **options)
  draft, after = jax.jit(
    lambda p, s: step.draft_step(model, drafter, rule, p, s)
  )(Params(params), started)

  @jax.jit
  def once(params, cache, tokens):  # the same in one pass, cache made anew
    filled, _ = kv.prefill(
      model, params, started.tokens, cache, length - 1, chunk=4
    )
    return model.apply(params, tokens, filled, skip=SOME)[0].logits

  slots = started.target_cache.num_slots
  logits = once(params, model.init_cache(len(length), slots), draft.tokens)
  wanted = sampling.warp(logits, started.sampling)[:, :-1]
  np.testing.assert_allclose(draft.log_probs[:, 1:], wanted, atol=1e-4)
  # And what decoding notes of the first round's tokens is said by these
  # distributions.
  at = np.arange(len(length)), LENGTHS
  noted = np.isin(np.asarray(state.origin)[at], [ACCEPTED, CORRECTION])
  assert noted.any()
  own = draft.log_probs[at[0], 1, tokens[at]]
  np.testing.assert_allclose(
    np.asarray(state.draft_log_probs)[at][noted], own[noted], atol=1e-4
  )
  for i, (old, new) in enumerate(
    zip(started.target_cache.layers, after.target_cache.layers)
  ):  # a skipped attention has no scratch
    same = bool(jnp.array_equal(old[0], new[0]))
    assert same == (i in SOME.attention)
  np.testing.assert_array_equal(after.target_cache.length, length - 1)


# What runs.


def products_of_a_draft(drafter):
  """Counter[(sublayer or head, tokens a row)] of one draft, by its HLO."""
  model, params = target("llama")
  rule, batch = acceptance.rejection(), 2
  positional, options = arguments("llama", slice(2, 4))
  state = decode.start(model, drafter, rule, *positional, **options)
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
  found = products_of_a_draft(skipper(skip=skip, k=3))
  assert found == {(name, 1): 3 for name in [*kept, "head.logits"]}


def test_weights_that_are_skipped_are_not_read():
  """Not even their shape is asked for: a drafter could do without them."""
  model, params = target("llama")
  thin = {
    name: {
      part: leaves
      for part, leaves in layer.items()
      if not (
        (name == "layer_1" and part.startswith(("attention", "mlp")))
        or (name == "layer_2" and part.startswith("mlp"))
      )
    }
    for name, layer in params.items()
  }
  cache = model.init_cache(1, 4)
  ids = jnp.array([[3]])
  run = jax.jit(lambda params: model.apply(params, ids, cache, skip=SOME)[0])
  np.testing.assert_array_equal(run(thin).logits, run(params).logits)


# The threshold.


def split_table():
  """A target whose draft is another table, for distributions that are known."""
  inner = table_model.model(distributions.V)

  def apply(params, tokens, cache, skip=None, **options):
    return inner.apply(
      params["whole" if skip is None else "kept"], tokens, cache, **options
    )

  whole, kept = distributions.PARAMS
  return inner._replace(apply=apply), Params({"whole": whole, "kept": kept})


def sampled(drafter, rule, model, params):
  """Texts of three tokens after one prompt, from the real loop."""
  return distributions.sample(
    drafter, rule, 2, distributions.GROUPS, params, model
  )


def drops_the_trigger(drafter):
  """What rule 7 forbids: the unlikely token that ended a draft is left out."""

  def propose(params, state, context):
    draft, state = drafter.propose(params, state, context)
    rows = jnp.arange(len(draft.count))
    last = draft.count - 1
    stopped = draft.log_probs[rows, last, draft.tokens[rows, last]]
    stopped = jnp.exp(stopped) < state.threshold
    return draft._replace(count=draft.count - stopped), state

  widths = (1, *drafter.spec.widths)
  spec = drafter.spec._replace(widths=widths)
  return drafter._replace(spec=spec, propose=propose)


@pytest.mark.parametrize(
  "rule, dropped",
  [
    (acceptance.rejection, False),
    (acceptance.rejection, True),
    pytest.param(acceptance.block, False, marks=SLOW),
    pytest.param(acceptance.block, True, marks=SLOW),
    pytest.param(acceptance.coupled, False, marks=SLOW),
  ],
)
def test_texts_follow_the_targets_distribution(rule, dropped):
  """And do not once the token that stopped a draft is dropped."""
  model, params = split_table()
  drafter = drafters.layer_skip(model, NOTHING, 3, Threshold(0.5))
  if dropped:
    drafter = drops_the_trigger(drafter)
  found = sampled(drafter, rule(), model, params)
  p = [distributions.p_value(*pair) for pair in zip(found, distributions.EXACT)]
  print(p)
  if dropped:
    assert p[0] < distributions.SMALLEST_P, p
  else:
    assert min(p) > distributions.SMALLEST_P, p


def test_a_row_stops_at_its_first_unlikely_token_and_keeps_it():
  """Whatever the temperature, by the draft's distribution before any warp."""
  model, params = target("llama")
  rule, k = acceptance.coupled(), 4
  drafter = skipper(k=k, threshold=UNSURE)
  positional, options = arguments("llama")
  state = decode.start(model, drafter, rule, *positional, **options)
  draft, _ = jax.jit(lambda p, s: step.draft_step(model, drafter, rule, p, s))(
    Params(params), state
  )
  logits = jax.jit(lambda p, t, c: model.apply(p, t, c, skip=SOME)[0].logits)(
    params, draft.tokens, state.target_cache
  )
  own = jax.nn.softmax(logits)[:, :-1]
  own = np.take_along_axis(np.asarray(own), draft.tokens[:, 1:, None], 2)[
    ..., 0
  ]
  for probs, count in zip(own, np.asarray(draft.count)):
    drafted = probs[: count - 1]
    assert len(drafted) >= 1
    assert np.all(drafted[:-1] >= UNSURE.start)
    assert len(drafted) == k or drafted[-1] < UNSURE.start
  assert len(set(np.asarray(draft.count).tolist())) > 1


def test_the_threshold_moves_as_the_paper_says():
  """Four rows: all kept and long, all kept and short, refused, done."""
  drafter = skipper(k=4, threshold=Threshold(0.5))
  positional, options = arguments("llama", slice(0, 4))
  state = decode.start(
    target("llama")[0], drafter, acceptance.coupled(), *positional, **options
  )
  context = step.context_of(state, 17, acceptance.coupled())
  draft, own = drafter.propose(positional[0], state.draft_state, context)
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
  draft, _ = drafter.propose(positional[0], again, context)
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
  with pytest.raises(ValueError, match=re.escape("keep more, or try fewer")):
    drafters.layer_skip(
      target("llama")[0], SOME, shape=draft_shape.dynamic(3, 3, 2)
    )
