"""Targets of four layers, and a batch of greedy and sampled rows for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import learned_kinds
from learned_kinds import BATCH, LENGTHS, TEMPERATURES, L, prompts
from specdec import decode, sampling
from specdec.models import transformer
from specdec.types import Params

LAYERS = 4
LLAMA = dataclasses.replace(learned_kinds.TARGET, num_layers=LAYERS)
CONFIGS = {
  "llama": LLAMA,
  "gemma": dataclasses.replace(
    learned_kinds.GEMMA, num_layers=LAYERS, windows=(4, None, 4, None)
  ),
}


@functools.cache
def target(name):
  """(model, its weights)."""
  config = CONFIGS[name]
  params = transformer.init_params(config, jax.random.key(0))
  return transformer.model(config), jax.tree.map(lambda x: 3 * x, params)


def arguments(name, rows=slice(None)):
  """Of decode.generate, behind model, drafter and rule."""
  _, params = target(name)
  return (
    Params(params),
    prompts()[rows],
    LENGTHS[rows],
    jax.random.key(0),
  ), {
    "max_length": L,
    "sampling": sampling.settings(
      len(LENGTHS[rows]), jnp.asarray(TEMPERATURES[rows])
    ),
    "index": jnp.arange(BATCH)[rows],
  }


def speculate(name, drafter, rule):
  positional, options = arguments(name)
  return decode.generate(target(name)[0], drafter, rule, *positional, **options)


def start(name, drafter, rule, rows=slice(None)):
  positional, options = arguments(name, rows)
  return decode.start(target(name)[0], drafter, rule, *positional, **options)
