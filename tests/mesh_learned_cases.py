"""Learned drafters on eight devices write what they write on one; run by
mesh_learned_test.py, which gives this file a process with eight devices.

The target is split, and its distributions; the drafter's weights and cache lie
whole on every chip, but for the rows of a batch.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from learned_kinds import KINDS, head_config, sharpened
from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
  sharding,
)
from specdec.compiled import hlo, lowering, traffic
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import Params

BATCH, PROMPT, LENGTH = 8, 6, 18
TARGET = TransformerConfig(
  vocab_size=64,
  num_layers=3,
  width=32,
  mlp_width=64,
  num_heads=8,
  num_kv_heads=2,
  head_dim=8,
)
IDS = np.arange(0, 64, 2)
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
SHAPES = {
  "chain": lambda: draft_shape.chain(3),
  "tree": lambda: draft_shape.static(
    draft_tree.from_paths([(0,), (1,), (0, 0)])
  ),
  "dynamic": lambda: draft_shape.dynamic(2, 2, 4),
  "behind copies": lambda: draft_shape.chain(2),
}
COPIED = 4  # more than it drafts
RULES = {"coupled": acceptance.coupled, "rejection": acceptance.rejection}
# What runs by default: every kind, on every mesh two.
DUE = {
  ("eagle", "chain", "rejection", (2, 4)),
  ("eagle3", "tree", "coupled", (4, 2)),
  ("mtp", "dynamic", "coupled", (1, 8)),
  ("prophet", "tree", "rejection", (8, 1)),
  ("medusa", "chain", "coupled", (2, 4)),
  ("hydra", "tree", "rejection", (1, 8)),
  ("recycle", "tree", "coupled", (4, 2)),
  ("head", "chain", "rejection", (8, 1)),
  ("eagle3", "behind copies", "rejection", (2, 4)),
}


def places(mesh):
  """Of the target, split like the mesh, and of a drafter that is whole."""
  data, model = mesh
  heads = sharding.shards(model, TARGET.num_kv_heads)
  made = sharding.make_mesh(data, model, [1, heads])
  return sharding.Places(
    sharding.place(made, TARGET.counts, model, "the target"),
    sharding.place(made, head_config("mtp").layers.counts, 1, "the drafter"),
  )


def drafter_of(kind, shape, config=TARGET, where=None):
  """(draft_head, model, drafter), one device's or a mesh's. Kinds with a head
  of
  their own guess among some tokens, the others among all."""
  target, draft = where or (None, None)
  few = head_config(kind).head == "own"
  made = head_config(kind, len(IDS) if few else 0)
  ids = IDS if few else None
  draft_head = drafters.LEARNED[made.kind](made, config, ids, draft)
  model = transformer.model(config, target)
  max_external_drafts = COPIED if shape == "behind copies" else 0
  drafter = serve.drafter(
    draft_head, model, SHAPES[shape](), target, max_external_drafts
  )
  if max_external_drafts:
    drafter = drafters.fallback(
      drafters.lookup(max_external_drafts, min_ngram=1), drafter
    )
  return draft_head, model, drafter


@functools.cache
def weights(kind):
  draft_head, *_ = drafter_of(kind, "chain")
  target = sharpened(transformer.init_params(TARGET, jax.random.key(0)), 6)
  net = sharpened(draft_head.init(jax.random.key(1)), 6)
  return Params(target, draft_heads.weights_of(draft_head, net, target))


def inputs():
  """Eight prompts, every other row sampled."""
  rng = np.random.default_rng(0)
  return decode.Inputs(
    rng.integers(0, 64, (BATCH, PROMPT), dtype=np.int32),
    rng.integers(1, PROMPT + 1, BATCH, dtype=np.int32),
    jax.random.key(7),
    sampling.settings(BATCH, np.arange(BATCH) % 2),
    np.full((BATCH,), LENGTH, np.int32),
    np.arange(BATCH, dtype=np.int32),
  )


@functools.cache
def one_device(kind, shape, rule):
  _, model, drafter = drafter_of(kind, shape)
  given = inputs()
  return decode.generate(
    model,
    drafter,
    RULES[rule](),
    weights(kind),
    given.prompt,
    given.prompt_length,
    given.key,
    max_length=LENGTH,
    sampling=given.sampling,
    eos_ids=(3,),
    limit=given.limit,
    index=given.index,
  )


def on_mesh(kind, shape, rule, where):
  _, model, drafter = drafter_of(kind, shape, where=where)
  target, draft = weights(kind)
  whole = where.target.sharding(())
  params = Params(
    jax.device_put(target, model_params.shardings(TARGET, where.target)),
    jax.device_put(draft, whole),
  )
  given = inputs()
  made = decode.on_mesh(
    model, drafter, RULES[rule](), params, given, LENGTH, where
  )
  state = made.start(params, jax.device_put(given, made.inputs))
  ends, most = jax.device_put(
    (np.array([3], np.int32), np.int32(decode.MAX_ROUNDS)), whole
  )
  return made.run(params, state, ends, most)


def matrix():
  """(kind, shape, rule, mesh), those that are due not slow."""
  return [
    pytest.param(*case, marks=() if case in DUE else pytest.mark.slow)
    for case in itertools.product(KINDS, SHAPES, RULES, MESHES)
    if not (case[1] == "behind copies" and head_config(case[0]).exits)
  ]


@pytest.mark.parametrize("kind, shape, rule, mesh", matrix())
def test_eight_devices_write_what_one_writes(kind, shape, rule, mesh):
  ours = on_mesh(kind, shape, rule, places(mesh))
  alone = one_device(kind, shape, rule)
  assert ours.length.tolist() == alone.length.tolist()
  for i, n in enumerate(alone.length.tolist()):
    assert ours.tokens[i, :n].tolist() == alone.tokens[i, :n].tolist()
  np.testing.assert_array_equal(ours.stats.rounds, alone.stats.rounds)
  np.testing.assert_array_equal(ours.stats.accepted, alone.stats.accepted)
  assert alone.stats.drafted.sum() > 0
  states = [ours.draft_state]
  if shape == "behind copies":
    states = [ours.draft_state.other]
  for buffer in jax.tree.leaves(states[0].cache.layers):
    rows, heads, *_ = buffer.sharding.shard_shape(buffer.shape)
    assert (rows, heads) == (BATCH // mesh[0], buffer.shape[1])


@pytest.mark.parametrize(
  "kind, shape",
  [
    ("eagle", "chain"),
    pytest.param("eagle", "behind copies", marks=pytest.mark.slow),
    pytest.param("recycle", "tree", marks=pytest.mark.slow),
    pytest.param("prophet", "tree", marks=pytest.mark.slow),
    pytest.param("hydra", "chain", marks=pytest.mark.slow),
  ],
)
def test_no_distribution_travels(kind, shape):
  """What eight shards of the vocabulary tell each other in a round is never as
  long as a shard's distributions."""
  where = places((1, 8))
  wide = dataclasses.replace(TARGET, vocab_size=4096)
  draft_head, model, drafter = drafter_of(kind, shape, wide, where)
  whole = where.target.sharding(())
  target = lowering.weights(wide, where.target)
  draft = jax.eval_shape(
    lambda t: draft_heads.weights_of(
      draft_head, draft_head.init(jax.random.key(0)), t
    ),
    target,
  )
  draft = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), draft
  )
  settings = sampling.settings(BATCH, 1.0)
  steps = lowering.steps(
    model,
    drafter,
    acceptance.rejection(),
    Params(target, draft),
    lowering.inputs(BATCH, PROMPT, settings, where),
    LENGTH,
    where,
  )
  nodes = drafter.spec.max_nodes
  found = traffic.exchanges(hlo.Program(steps["loop"]().compile().as_text()))
  assert any("Transformer" in one.source for one in found)
  for one in found:
    for size in one.shape:
      assert np.prod(size, initial=1) < 4096 * BATCH * nodes / 8, one
