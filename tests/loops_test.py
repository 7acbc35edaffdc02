"""Control flow for what holds a cache: what is not wanted costs nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import acceptance, decode, draft_length, drafters, sampling, step
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import Params
from specdec.utils import loops

WEIGHTS = jnp.asarray(np.random.default_rng(0).normal(size=(16, 48)))


def grown(state, x):
  return state + jnp.dot(x, WEIGHTS)


def outside_of_loops(function, *args) -> set[str]:
  """Products of the compiled program that stand in no loop."""
  text = jax.jit(function).lower(*args).compile().as_text()
  computations = {
    match[1]: match[2]
    for match in re.finditer(
      r"^(?:ENTRY )?%(\S+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S
    )
  }
  loops_of = set(re.findall(r"body=%([\w.-]+)", text))
  seen, todo = set(), [re.search(r"^ENTRY %(\S+)", text, re.M)[1]]
  while todo:
    name = todo.pop()
    if name not in seen | loops_of:
      seen.add(name)
      names = set(re.findall(r"%([\w.-]+)", computations[name]))
      todo += names & computations.keys()
  return {
    product
    for name in seen
    for product in re.findall(r"\S+ = \S+ dot\(", computations[name])
  }


def test_a_body_runs_where_its_condition_holds():
  state, x = jnp.zeros((3, 48)), jnp.ones((3, 16))
  run = jax.jit(lambda wanted: loops.when(wanted, grown, state, x))
  np.testing.assert_array_equal(run(jnp.array(False)), state)
  np.testing.assert_allclose(run(jnp.array(True)), grown(state, x), rtol=1e-6)


def test_what_is_not_wanted_is_not_computed():
  """XLA moves what does not change in a loop out of it, and with it the first
  products of every width that does not run."""
  args = jnp.array(False), jnp.zeros((3, 48)), jnp.ones((3, 16))

  def bare(wanted, state, x):
    turns = wanted.astype(jnp.int32)
    return jax.lax.fori_loop(0, turns, lambda _, s: grown(s, x), state)

  def ours(wanted, state, x):
    return loops.when(wanted, grown, state, x)

  assert outside_of_loops(bare, *args), "XLA no longer does; is when needed?"
  assert not outside_of_loops(ours, *args)


CONFIG = TransformerConfig(
  vocab_size=32,
  num_layers=2,
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
)


@pytest.mark.parametrize("name", ["lookup", "model"])
def test_widths_that_a_round_does_not_need_are_not_computed(name):
  """Nor is a draft model in a round that drafts nothing."""
  target = transformer.model(CONFIG)
  weights = transformer.init_params(CONFIG, jax.random.key(0))
  shape = draft_length.adaptive(4)
  drafter = {
    "lookup": drafters.lookup(shape=shape),
    "model": drafters.model(target, shape=shape),
  }[name]
  assert len(drafter.spec.widths) > 2
  parts = target, drafter, acceptance.rejection()
  params = Params(weights, weights)
  prompt, length = jnp.ones((3, 4), jnp.int32), jnp.full((3,), 4)
  state = decode.start(
    *parts,
    params,
    prompt,
    length,
    jax.random.key(0),
    max_length=16,
    sampling=sampling.settings(3),
  )
  eos = jnp.zeros((0,), jnp.int32)

  def one_round(params, state):
    return step.decode_step(*parts, params, state, eos)

  assert not outside_of_loops(one_round, params, state)
