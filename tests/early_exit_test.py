"""Early exit: autoregressive decoding's text at every E, and no layer run
twice.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from four_layers import (
  LAYERS,
  arguments,
  speculate,
  start,
  target,
)
from hlo import products
from learned_kinds import (
  BATCH,
  LENGTHS,
  TEMPERATURES,
  L,
  small_chunks,  # noqa: F401, a fixture
)
from specdec import acceptance, decode, drafters, sampling, step
from specdec.types import ACCEPTED, CORRECTION, Draft, DraftSpec, Params, Resume
from texts import forward, texts


def test_what_it_hands_over_is_what_it_drew_from():
  """Layers 0 .. E - 1, run autoregressively, give the very distributions that
  were noted.
  """
  model, params = target("llama")
  drafter = drafters.early_exit(model, 2, 3)
  state = speculate("llama", drafter, acceptance.rejection())

  def exit_early(params, tokens, cache, **options):
    return model.apply(params, tokens, cache, stop=2, **options)

  shallow = model._replace(apply=exit_early)
  tokens, origin = np.asarray(state.tokens), np.asarray(state.origin)
  settings = sampling.settings(BATCH, TEMPERATURES)
  drawn = np.asarray(sampling.warp(forward(shallow, params, tokens), settings))
  own = np.asarray(jax.nn.log_softmax(forward(model, params, tokens)))
  for b in range(BATCH):
    places = np.arange(LENGTHS[b], int(state.length[b]))
    written = tokens[b, places]
    compared = np.isin(origin[b, places], [ACCEPTED, CORRECTION])
    drafted = np.asarray(state.draft_log_probs)[b, places]
    np.testing.assert_allclose(
      drafted[compared], drawn[b, places - 1, written][compared], atol=1e-4
    )
    np.testing.assert_allclose(
      np.asarray(state.log_probs)[b, places],
      own[b, places - 1, written],
      atol=1e-4,
    )


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
    tokens = (right + jnp.array([[0, 0, 1, 1, 0, 1]])) % 17
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

  baseline_drafter = drafters.early_exit(model, exit_layer, 0)
  return baseline_drafter._replace(spec=spec, propose=propose)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_tree_can_be_resumed_too(name):
  positional, options = arguments(name)
  expected = decode.autoregress(target(name)[0], *positional, **options)
  drafter = seer(name, 2, expected.tokens)
  state = speculate(name, drafter, acceptance.coupled())
  assert texts(state) == texts(expected)
  assert np.all(np.asarray(state.stats.widths) > 0)  # both were run
  # Nothing that was drafted on the right path was refused.
  assert np.all(np.asarray(state.stats.accepted)[:, 0] > 0)
  np.testing.assert_array_equal(state.stats.evaluated, state.stats.accepted)


def products_of_a_round(drafter):
  """Counter[(layer or 'head', tokens a row)] of one round, by its HLO."""
  model, params = target("llama")
  rule, batch = acceptance.rejection(), 2
  state = start("llama", drafter, rule, slice(2, 4))
  program = jax.jit(
    lambda params, state: step.decode_step(
      model, drafter, rule, params, state, jnp.zeros((0,), jnp.int32)
    )
  )
  hlo = program.lower(Params(params), state).compile().as_text()
  counts = products(hlo, r"(layer_\d+/mlp/gate|head\.logits)")
  return {
    (name.split("/")[0], rows // batch): n for (name, rows), n in counts.items()
  }


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_a_round_runs_no_layer_twice(exit_layer):
  k = 3
  drafter = drafters.early_exit(target("llama")[0], exit_layer, k)
  below = [f"layer_{i}" for i in range(exit_layer)]
  above = [f"layer_{i}" for i in range(exit_layer, LAYERS)]
  assert products_of_a_round(drafter) == {
    **{(layer, 1): k + 1 for layer in below},
    ("head.logits", 1): k,
    **{(layer, k + 1): 1 for layer in [*above, "head.logits"]},
  }


def test_the_count_sees_a_verification_that_starts_at_the_bottom():
  drafter = drafters.early_exit(target("llama")[0], 2, 3)

  def propose(*arguments):
    draft, draft_state = drafter.propose(*arguments)
    return draft._replace(resume=None), draft_state

  counts = products_of_a_round(drafter._replace(propose=propose))
  assert counts["layer_0", 4] == counts["layer_1", 4] == 1


@pytest.mark.parametrize("exit_layer", [0, LAYERS])
def test_exits_outside_the_model_are_refused(exit_layer):
  with pytest.raises(ValueError, match=f"has {LAYERS} layers.*1..3"):
    drafters.early_exit(target("llama")[0], exit_layer, 3)
