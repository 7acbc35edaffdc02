"""Recorded models of several families, decoded with any drafter."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np

import learned_kinds
from specdec import (
  acceptance,
  checkpoints,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models import params as model_params
from specdec.models import transformer, weight_formats
from specdec.types import Params, Skip

PARITY = Path(__file__).parent / "fixtures" / "parity"
K, MAX_LENGTH = 3, 36
LENGTHS = np.array([1, 4, 9, 14] * 2)
TEMPERATURES = np.repeat([1.0, 0.0], 4)
TREE = draft_tree.from_paths([(0,), (1,), (0, 0), (1, 0)])
DRAFTERS = {  # (target, draft) -> Drafter
  "baseline": lambda *_: decode.NO_DRAFTER,
  "lookup": lambda *_: drafters.lookup(K, min_ngram=1),
  "model": lambda _, draft: drafters.model(draft, K),
  "tree": lambda _, draft: drafters.model(
    draft, shape=draft_shape.static(TREE)
  ),
  "early_exit": lambda target, _: drafters.early_exit(target, 1, K),
  "layer_skip": lambda target, _: drafters.layer_skip(
    target, Skip((0,), (1,)), K
  ),
}


@functools.cache
def recorded(name, weights=None, kv=None):
  form = None if weights is None else weight_formats.parse(weights)
  loaded = checkpoints.load(PARITY / name, weights=form)
  config = dataclasses.replace(loaded.config, kv=kv)
  loaded = dataclasses.replace(loaded, config=config)
  if r := loaded.config.recurrence:  # whose slots are full within our texts
    r = dataclasses.replace(r, num_nodes=8)
    config = dataclasses.replace(loaded.config, recurrence=r)
    loaded = dataclasses.replace(loaded, config=config)
  return loaded


def decoded(name, drafter, where=None, weights=None, kv=None):
  """The state of eight prompts; the draft is the target, somewhat changed.

  Args:
    where: sharding.Places of a mesh.
  """
  loaded = recorded(name, weights, kv)
  models = [
    transformer.model(loaded.config, place) for place in where or (None, None)
  ]
  target = loaded.params
  if drafter in DRAFTERS:
    made = DRAFTERS[drafter](*models)
    draft = None
    if drafter in ("model", "tree"):
      noise = jax.random.key(1)
      draft = jax.tree.map(
        lambda x: x + 0.02 * jax.random.normal(noise, x.shape), target
      )
  else:
    layers = {"features": (1, 2)} if drafter.endswith("eagle3") else {}
    place = where and where.draft
    head = learned_kinds.draft_head(
      drafter, True, place, config=loaded.config, **layers
    )
    shape = draft_shape.chain(K)
    made = serve.drafter(head, models[0], shape, where and where.target)
    net = learned_kinds.sharpened(head.init(jax.random.key(1)), 6)
    draft = draft_heads.weights_of(head, net, target)
  options = {}
  if where:
    put = [model_params.shardings(loaded.config, place) for place in where]
    target = jax.device_put(target, put[0])
    if drafter not in DRAFTERS:  # a head lies whole on every chip
      put[1] = where.target.sharding(())
    draft = None if draft is None else jax.device_put(draft, put[1])
    options["mesh"] = where
  rng = np.random.default_rng(0)
  size = loaded.config.vocab_size
  return decode.generate(
    models[0],
    made,
    decode.NO_DRAFT_RULE if drafter == "baseline" else acceptance.coupled(),
    Params(target, draft),
    rng.integers(0, size, (8, LENGTHS.max()), dtype=np.int32),
    LENGTHS,
    jax.random.key(7),
    max_length=MAX_LENGTH,
    sampling=sampling.settings(8, TEMPERATURES),
    **options,
  )
