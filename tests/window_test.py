"""B6: speculation across the edge of a sliding window changes no text.

A cache that holds a window's slots only loses committed text to a burst of
drafted nodes; a mask by slot shows a tree's nodes too much or too little.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, drafters, sampling
from specdec import cache as kv
from specdec.models import config, transformer
from specdec.testing.books import check_books
from specdec.types import Draft, Drafter, DraftSpec, Params
from texts import forward, texts

L, WINDOW = 26, 3
# Prompts that end before, at and after the edge, at T = 1 and at T = 0.
LENGTHS = np.array([1, 2, 3, 4, 9] * 2)
TEMPERATURES = np.repeat([1.0, 0.0], 5)
ROWS = len(LENGTHS)
SLOW = pytest.mark.slow

LLAMA = config.TransformerConfig(
  vocab_size=17,
  num_layers=2,
  width=32,
  mlp_width=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
CONFIGS = {
  "uniform": {"windows": (WINDOW, WINDOW)},
  "alternating": {
    "windows": (WINDOW, None),
    "attention_softcap": 2.0,
    "logit_softcap": 5.0,
  },
  "two rope bases": {
    "windows": (WINDOW, None),
    "rope_theta": 1e6,
    "local_rope_theta": 100.0,
    "qk_norm": True,
    "post_norms": True,
    "norm_offset": True,
    "scale_embedding": True,
    "activation": "gelu_tanh",
    "query_scalar": 20,
    "tied": True,
  },
}


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv, "CHUNK", 4)
    yield


@functools.cache
def family(name):
  """(model, params) of a target and a draft that often agree."""
  shape = config.TransformerConfig(**(vars(LLAMA) | CONFIGS[name]))
  target, other = (
    jax.tree.map(lambda x: 4 * x, transformer.init_params(shape, key))
    for key in jax.random.split(jax.random.key(0))
  )
  draft = jax.tree.map(lambda t, o: t + 0.3 * o, target, other)
  return transformer.model(shape), Params(target, draft)


def arguments(name):
  prompts = np.random.default_rng(0).integers(0, 17, size=(ROWS, 9))
  prompts[:, 4:] = prompts[:, :5]  # something to look up
  _, params = family(name)
  settings = sampling.settings(ROWS, TEMPERATURES)
  return (params, prompts, LENGTHS, jax.random.key(0)), {
    "max_length": L,
    "sampling": settings,
  }


@functools.cache
def baseline(name):
  positional, options = arguments(name)
  return decode.autoregress(family(name)[0], *positional, **options)


def comb(text):
  """A tree that knows the text, and errs at every fifth position.

  At each depth the first child is wrong, the second is right and has children,
  so the accepted path is never a chain and always has to move.
  """
  parents = np.array([-1, 0, 0, 2, 2, 4, 4, 6, 6], np.int32)
  depth = (np.arange(9) + 1) // 2
  spec = DraftSpec.of(parents, siblings="deterministic")

  def propose(params, draft_state, context):
    place = context.length[:, None] - 1 + depth[None]  # [B, N]
    right = jnp.take_along_axis(text, jnp.minimum(place, L - 1), axis=1)
    wrong = (np.arange(9)[None] % 2 == 1) | (place % 5 == 0)
    wrong &= depth[None] > 0
    tokens = jnp.where(wrong, (right + 1 + depth[None] % 2) % 17, right)
    count = jnp.full_like(context.length, 9)
    return Draft(tokens, None, None, count), draft_state

  return Drafter(
    spec,
    lambda params, context, prefill_output: None,
    propose,
    lambda params, draft_state, *rest: draft_state,
  )


def drafter_of(name, kind, k):
  if kind == "comb":
    return comb(baseline(name).tokens)
  if kind == "lookup":
    return drafters.lookup(k, ngram=2, min_ngram=1)
  return drafters.model(family(name)[0], k)


def cases():
  for name in CONFIGS:
    # With the pending token more nodes than the window has positions; one of
    # these in the quick suite, for two models take long to compile.
    quick = name == "two rope bases"
    yield pytest.param(name, "model", 3, marks=() if quick else SLOW)
    yield name, "lookup", 5
    yield name, "comb", None
    for kind, k in (("model", 1), ("model", 7), ("lookup", 2), ("lookup", 8)):
      yield pytest.param(name, kind, k, marks=SLOW)


@pytest.mark.parametrize("name, kind, k", cases())
def test_b06_coupled_is_autoregressive_decoding(name, kind, k):
  positional, options = arguments(name)
  state = decode.generate(
    family(name)[0],
    drafter_of(name, kind, k),
    acceptance.coupled(),
    *positional,
    **options,
  )
  assert texts(state) == texts(baseline(name))
  check_books(state, LENGTHS, k if kind == "model" else None)
  assert state.stats.accepted[:, -1 if kind == "comb" else 0].sum() > 0
  np.testing.assert_allclose(
    state.log_probs, baseline(name).log_probs, atol=1e-4
  )


@pytest.mark.parametrize("name", CONFIGS)
def test_b06_autoregressive_decoding_is_one_pass(name):
  model, params = family(name)
  state = baseline(name)
  assert np.all(state.length == L)
  own = jax.nn.log_softmax(forward(model, params.target, state.tokens))
  said = np.take_along_axis(own[:, :-1], state.tokens[:, 1:, None], axis=2)
  for b, start in enumerate(LENGTHS):
    np.testing.assert_allclose(
      state.log_probs[b, start:], said[b, start - 1 :, 0], atol=1e-4
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_window_matters_here(name):
  """Else the tests above would show nothing."""
  model, params = family(name)
  wide = config.TransformerConfig(
    **(vars(LLAMA) | CONFIGS[name] | {"windows": (L, L)})
  )
  tokens = baseline(name).tokens
  logits = forward(model, params.target, tokens)
  other = forward(transformer.model(wide), params.target, tokens)
  sampled = TEMPERATURES > 0  # greedy text may repeat one token
  assert np.abs(logits - other)[sampled, WINDOW:].max(-1).min() > 1e-3
