"""Early exit: autoregressive decoding's text at every E, and no layer run
twice.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlo import products
from specdec import (
  acceptance,
  checkpoints,
  decode,
  drafters,
  sampling,
  step,
)
from specdec import (
  cache as kv,
)
from specdec.checkpoints import shipped
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import ACCEPTED, CORRECTION, Draft, DraftSpec, Params, Resume
from texts import forward, texts

L = 30
LAYERS = 4
LENGTHS = np.array([1, 2, 5, 9] * 2)
TEMPERATURES = np.repeat([1.0, 0.0], 4)
BATCH = len(LENGTHS)
LLAMA = TransformerConfig(
  vocab_size=17,
  num_layers=LAYERS,
  width=32,
  mlp_width=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
GEMMA = dataclasses.replace(
  LLAMA,
  tied=True,
  windows=(4, None, 4, None),
  local_rope_theta=100.0,
  qk_norm=True,
  post_norms=True,
  norm_offset=True,
  scale_embedding=True,
  logit_softcap=5.0,
)
CONFIGS = {"llama": LLAMA, "gemma": GEMMA}
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv, "CHUNK", 4)
    yield


@functools.cache
def target(name):
  config = CONFIGS[name]
  params = transformer.init_params(config, jax.random.key(0))
  return transformer.model(config), jax.tree.map(lambda x: 3 * x, params)


def arguments(name, rows=slice(None)):
  _, params = target(name)
  prompt = np.random.default_rng(0).integers(0, 17, size=(BATCH, 9))
  return (
    Params(params),
    prompt[rows],
    LENGTHS[rows],
    jax.random.key(0),
  ), {
    "max_length": L,
    "sampling": sampling.settings(
      len(LENGTHS[rows]), jnp.asarray(TEMPERATURES[rows])
    ),
    "index": jnp.arange(BATCH)[rows],
  }


def speculate(name, exit_layer, k, rule, rows=slice(None), **more):
  model, _ = target(name)
  positional, options = arguments(name, rows)
  drafter = drafters.early_exit(model, exit_layer, k)
  return decode.generate(model, drafter, rule, *positional, **(options | more))


@functools.cache
def baseline(name, eos_ids=()):
  positional, options = arguments(name)
  return decode.autoregress(
    target(name)[0], *positional, eos_ids=eos_ids, **options
  )


def test_what_it_hands_over_is_what_it_drew_from():
  """Layers 0 .. E - 1, run autoregressively, give the very distributions that
  were noted.
  """
  model, params = target("llama")
  state = speculate("llama", 2, 3, acceptance.rejection())

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
    said = np.asarray(state.draft_log_probs)[b, places]
    np.testing.assert_allclose(
      said[compared], drawn[b, places - 1, written][compared], atol=1e-4
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
  expected = baseline(name)
  positional, options = arguments(name)
  state = decode.generate(
    target(name)[0],
    seer(name, 2, expected.tokens),
    acceptance.coupled(),
    *positional,
    **options,
  )
  assert texts(state) == texts(expected)
  assert np.all(np.asarray(state.stats.widths) > 0)  # both were run
  # Nothing that was drafted on the right path was refused.
  assert np.all(np.asarray(state.stats.accepted)[:, 0] > 0)
  np.testing.assert_array_equal(state.stats.evaluated, state.stats.accepted)


def test_the_shipped_target_exits_early():
  checkpoint = checkpoints.load(shipped.FOLDER / shipped.TARGET)
  model = transformer.model(checkpoint.config)
  ids = checkpoint.tokenizer.encode(shipped.PROMPT.read_text())
  common = (
    Params(checkpoint.params),
    np.array([ids]),
    np.array([len(ids)]),
    jax.random.key(0),
  )
  options = dict(max_length=len(ids) + 24, sampling=sampling.settings(1))
  state = decode.generate(
    model,
    drafters.early_exit(model, 3, 3),
    acceptance.coupled(),
    *common,
    **options,
  )
  assert texts(state) == texts(decode.autoregress(model, *common, **options))
  assert state.stats.accepted.sum() > 0


def products_of_a_round(drafter):
  """Counter[(layer or 'head', tokens a row)] of one round, by its HLO."""
  model, params = target("llama")
  rule, batch = acceptance.rejection(), 2
  positional, options = arguments("llama", slice(2, 4))
  state = decode.start(model, drafter, rule, *positional, **options)
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


@pytest.mark.parametrize("exit_layer", [-1, 0, LAYERS, 9])
def test_exits_outside_the_model_are_refused(exit_layer):
  with pytest.raises(ValueError, match=f"has {LAYERS} layers.*1..3"):
    drafters.early_exit(target("llama")[0], exit_layer, 3)


def test_a_negative_k_is_refused():
  with pytest.raises(ValueError, match="k = -1"):
    drafters.early_exit(target("llama")[0], 1, -1)
