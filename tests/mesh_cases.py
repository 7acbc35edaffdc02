"""Eight devices write what one writes; run by mesh_test.py, which gives this
file a process with eight virtual devices.

Every drafter that a rule is right for, on every mesh: the whole matrix is slow.
What is not covers it in pairs: every drafter on every mesh and every rule on
every mesh come up in some case, and so does each drafter and rule with the
draft laid out like the target and on fewer chips. A batch has greedy and
sampled rows, but for the rule that is greedy; their texts and their rounds are
one device's.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import numpy as np
import pytest

from specdec import (
  acceptance,
  checkpoints,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
  sharding,
  step,
)
from specdec.checkpoints import huggingface
from specdec.compiled import hlo, lowering, traffic
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import Params, Skip

BATCH, PROMPT, LENGTH, K = 8, 6, 18, 2
TARGET = TransformerConfig(
  vocab_size=64,
  num_layers=2,
  width=32,
  mlp_width=64,
  num_heads=8,
  num_kv_heads=2,  # fewer than eight chips: some of them share one
  head_dim=8,
)
DRAFT = dataclasses.replace(TARGET, num_layers=1, width=16, num_kv_heads=4)
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))


def drafter_of(name, target, draft):
  paths = [(0,), (1,), (0, 0)]
  static = functools.partial(draft_shape.static, draft_tree.from_paths(paths))
  chains = draft_shape.static(draft_tree.parallel(2, K), "iid")
  return {
    "baseline": lambda: decode.NO_DRAFTER,
    "lookup": lambda: drafters.lookup(K, min_ngram=1),
    "model": lambda: drafters.model(draft, K),
    "early_exit": lambda: drafters.early_exit(target, 1, K),
    "layer_skip": lambda: drafters.layer_skip(
      target, Skip((0,), (1,)), K, drafters.Threshold(0.2)
    ),
    "chains": lambda: drafters.model(draft, shape=chains),
    "tree": lambda: drafters.model(draft, shape=static()),
    "points": lambda: drafters.model(draft, shape=static("deterministic")),
    "dynamic": lambda: drafters.model(
      draft, shape=draft_shape.dynamic(2, 2, 4)
    ),
    "exit_tree": lambda: drafters.early_exit(target, 1, shape=static()),
    "exit_dynamic": lambda: drafters.early_exit(
      target, 1, shape=draft_shape.dynamic(2, 2, 4)
    ),
  }[name]()


RULES = {
  "baseline": lambda: decode.NO_DRAFT_RULE,
  "coupled": acceptance.coupled,
  "naive": acceptance.naive,
  "greedy": acceptance.greedy,
  "rejection": acceptance.rejection,
  "block": acceptance.block,
  "kseq": acceptance.kseq,
  "typical": acceptance.typical,
  "lenience": lambda: acceptance.lenience(0.5),
  "relaxed": lambda: acceptance.relaxed(3, 0.2),
}
DRAFTERS = (
  "lookup", "model", "early_exit", "chains", "tree", "points", "dynamic",
  "exit_tree", "exit_dynamic", "layer_skip",
)  # fmt: skip


def fits(drafter, rule):
  model = transformer.model(TARGET), transformer.model(DRAFT)
  try:
    decode.check_pair(drafter_of(drafter, *model).spec, RULES[rule]())
  except ValueError:
    return False
  return True


PAIRS = (
  ("baseline", "baseline"),
  *((d, r) for d in DRAFTERS for r in list(RULES)[1:] if fits(d, r)),
)
MATRIX = tuple((*pair, mesh) for pair in PAIRS for mesh in MESHES)


def together(case):
  """What a case tries together: its drafter and its rule, each with the mesh
  and with where the draft lies."""
  drafter, rule, mesh, less = enumerate((*case, fewer(case)))
  return set(itertools.product((drafter, rule), (mesh, less)))


def fewer(case):
  """Whether the draft lies on fewer chips than the target: every other time."""
  choices = ((*DRAFTERS, "baseline"), tuple(RULES), MESHES)
  return case[2][1] > 1 and sum(map(tuple.index, choices, case)) % 2 == 1


def cover():
  """Cases that try together whatever the matrix does, always the next best."""
  left, found = set().union(*map(together, MATRIX)), []

  def worth(case):  # of equals one on the mesh that has the fewest
    return len(left & together(case)), -sum(case[2] == x[2] for x in found)

  while left:
    found.append(max(MATRIX, key=worth))
    left -= together(found[-1])
  return found


COVER = cover()


def name(case):
  drafter, rule, (data, model) = case
  return f"{drafter}-{rule}-{data}x{model}"


@functools.cache
def weights():
  return [
    transformer.init_params(config, jax.random.key(i))
    for i, config in enumerate((TARGET, DRAFT))
  ]


def sharpened(params):
  """Weights whose distributions are far from flat, so that texts have few
  near-ties.
  """
  return jax.tree.map(lambda x: 6 * x if x.ndim == 2 else x, params)


def inputs(greedy):
  """Eight prompts, every other row sampled unless all are greedy."""
  rng = np.random.default_rng(0)
  temperature = np.zeros(BATCH) if greedy else np.arange(BATCH) % 2
  return decode.Inputs(
    rng.integers(0, 64, (BATCH, PROMPT), dtype=np.int32),
    rng.integers(1, PROMPT + 1, BATCH, dtype=np.int32),
    jax.random.key(7),
    sampling.settings(BATCH, temperature),
    np.full((BATCH,), LENGTH, np.int32),
    np.arange(BATCH, dtype=np.int32),
  )


@functools.cache
def one_device(drafter, rule):
  models = transformer.model(TARGET), transformer.model(DRAFT)
  given = inputs(rule == "greedy")
  return decode.generate(
    models[0],
    drafter_of(drafter, *models),
    RULES[rule](),
    Params(*map(sharpened, weights())),
    given.prompt,
    given.prompt_length,
    given.key,
    max_length=LENGTH,
    sampling=given.sampling,
    eos_ids=(3,),
    limit=given.limit,
    index=given.index,
  )


def places(data, model, draft_ways):
  parts = [draft_ways]
  parts += [
    sharding.shards(w, c.num_kv_heads)
    for c, w in ((TARGET, model), (DRAFT, draft_ways))
  ]
  mesh = sharding.make_mesh(data, model, parts)
  return sharding.Places(
    sharding.place(mesh, TARGET.counts, model, "the target"),
    sharding.place(mesh, DRAFT.counts, draft_ways, "the draft"),
  )


def put(params, config, place):
  return jax.device_put(params, model_params.shardings(config, place))


def on_mesh(drafter, rule, where):
  models = [
    transformer.model(config, place)
    for config, place in zip((TARGET, DRAFT), where)
  ]
  params = Params(
    *[
      put(sharpened(p), config, place)
      for p, config, place in zip(weights(), (TARGET, DRAFT), where)
    ]
  )
  given = inputs(rule == "greedy")
  made = decode.on_mesh(
    models[0],
    drafter_of(drafter, *models),
    RULES[rule](),
    params,
    given,
    LENGTH,
    where,
  )
  state = made.start(params, jax.device_put(given, made.inputs))
  whole = where.target.sharding(())
  ends, most = jax.device_put(
    (np.array([3], np.int32), np.int32(decode.MAX_ROUNDS)), whole
  )
  return made.run(params, state, ends, most)


def test_the_cover_is_one():
  def tried(cases, *places):
    return {tuple(case[i] for i in places) for case in cases}

  for place in 0, 1:
    every = set(itertools.product({x[place] for x in PAIRS}, MESHES))
    assert tried(COVER, place, 2) == every
    both = {(case[place], fewer(case)) for case in COVER}
    assert len(both) == 2 * len({x[place] for x in PAIRS})


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(c, id=name(c), marks=() if c in COVER else pytest.mark.slow)
    for c in MATRIX
  ],
)
def test_eight_devices_write_what_one_writes(case):
  drafter, rule, (data, model) = case
  draft_ways = {1: 1, 2: 1, 4: 2, 8: 4}[model] if fewer(case) else model
  ours = on_mesh(drafter, rule, places(data, model, draft_ways))
  alone = one_device(drafter, rule)
  assert ours.length.tolist() == alone.length.tolist()
  lengths = alone.length.tolist()
  for i, n in enumerate(lengths):
    assert ours.tokens[i, :n].tolist() == alone.tokens[i, :n].tolist()
  np.testing.assert_array_equal(ours.stats.rounds, alone.stats.rounds)


def by_api(decoding, where, **options):
  """The arguments of a user who calls decode with mesh=."""
  models = [
    transformer.model(config, place)
    for config, place in zip((TARGET, DRAFT), where)
  ]
  params = Params(
    *[
      put(sharpened(p), config, place)
      for p, config, place in zip(weights(), (TARGET, DRAFT), where)
    ]
  )
  given = inputs(greedy=False)
  return decoding(
    models[0],
    drafters.model(models[1], K),
    acceptance.rejection(),
    params,
    given.prompt,
    given.prompt_length,
    given.key,
    max_length=LENGTH,
    sampling=given.sampling,
    eos_ids=(3,),
    mesh=where,
    **options,
  )


def test_generate_and_stream_take_a_mesh(monkeypatch):
  """A loop of calls compiles once, and its texts are one device's."""
  alone = one_device("model", "rejection")
  traced = chex.assert_max_traces(step.decode_step, n=1)
  monkeypatch.setattr(step, "decode_step", traced)
  where = sharding.places("data:2,model:4", TARGET.counts, DRAFT.counts, 2)
  states = [by_api(decode.generate, where) for _ in range(2)]
  *_, streamed = by_api(decode.stream, where, every=3)
  for state in (*states, streamed):
    assert state.tokens.sharding.mesh == where.target.mesh
    for i, n in enumerate(alone.length.tolist()):
      assert state.length[i] == n
      assert state.tokens[i, :n].tolist() == alone.tokens[i, :n].tolist()


def test_a_mesh_needs_weights_that_lie_on_it_and_rows_that_divide():
  where = sharding.places("data:2,model:4", TARGET.counts)
  given = inputs(greedy=False)
  arguments = given.prompt, given.prompt_length, given.key
  options = {"max_length": LENGTH, "mesh": where.target}
  model = transformer.model(TARGET, where.target)
  with pytest.raises(ValueError, match="does not lie on the mesh"):
    decode.autoregress(
      model,
      Params(weights()[0]),
      *arguments,
      sampling=given.sampling,
      **options,
    )
  params = Params(put(weights()[0], TARGET, where.target))
  odd = jax.tree.map(lambda x: x[:3], arguments[:2])
  with pytest.raises(ValueError, match="3 rows over data:2"):
    decode.autoregress(
      model,
      params,
      *odd,
      given.key,
      sampling=sampling.settings(3),
      **options,
    )


def test_each_device_reads_its_own_part(tmp_path, monkeypatch):
  """Of safetensors: what is asked for is what a device holds, and no more."""
  params = transformer.init_params(TARGET, jax.random.key(0))
  checkpoints.save_safetensors(tmp_path, params, TARGET)
  (tmp_path / "tokenizer_config.json").write_text("{}")
  place = places(2, 4, 2).target
  asked, read = [], huggingface.Weights.read

  def noted(self, name, *rest):
    found = read(self, name, *rest)
    asked.append((name, found.size))
    return found

  monkeypatch.setattr(huggingface.Weights, "read", noted)
  loaded = checkpoints.load(tmp_path, place=place).params
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  whole = model_params.shardings(TARGET, place)
  assert jax.tree.map(lambda x: x.sharding, loaded) == whole
  sizes = {name: size for name, size in asked}
  gate = sizes["model.layers.0.mlp.gate_proj.weight"]
  assert gate == TARGET.mlp_width * TARGET.width // 4
  assert sizes["model.embed_tokens.weight"] == 64 * TARGET.width // 4


def test_every_leaf_lies_where_it_should():
  where = places(2, 4, 2)
  state = on_mesh("model", "rejection", where)
  key, _ = state.target_cache.layers[0]
  assert key.sharding.shard_shape(key.shape)[:2] == (BATCH // 2, 1)
  own, _ = state.draft_state.cache.layers[0]
  assert own.sharding.shard_shape(own.shape)[:2] == (BATCH // 2, 2)
  assert state.tokens.sharding.shard_shape(state.tokens.shape)[0] == BATCH // 2


@pytest.mark.parametrize(
  "rule, drafter, draft_ways",
  [
    ("coupled", "model", 4),
    ("rejection", "model", 1),
    ("rejection", "model", 4),
    ("rejection", "model", 8),
    ("rejection", "tree", 8),
    ("block", "model", 4),
    ("kseq", "chains", 4),
    ("typical", "tree", 4),
    ("greedy", "lookup", 4),
  ],
)
def test_acceptance_gathers_no_distribution(rule, drafter, draft_ways):
  """What eight shards of the vocabulary tell each other is O(B N) numbers."""
  where = places(1, 8, draft_ways)
  wide = dataclasses.replace(TARGET, vocab_size=4096)
  draft = dataclasses.replace(DRAFT, vocab_size=4096)
  models = [transformer.model(c, p) for c, p in zip((wide, draft), where)]
  params = Params(
    *[lowering.weights(c, p) for c, p in zip((wide, draft), where)]
  )
  temperature = 0.0 if rule == "greedy" else 1.0
  settings = sampling.settings(BATCH, temperature, top_p=0.9, top_k=50)
  made = drafter_of(drafter, *models)
  steps = lowering.steps(
    models[0],
    made,
    RULES[rule](),
    params,
    lowering.inputs(BATCH, PROMPT, settings, where),
    LENGTH,
    where,
  )
  found = traffic.exchanges(hlo.Program(steps["accept"]().compile().as_text()))
  assert found, "eight shards must tell each other something"
  nodes = made.spec.max_nodes
  for one in found:
    for shape in one.shape:
      # One number a shard of every node is what an argmax gathers.
      assert np.prod(shape, initial=1) <= 16 * BATCH * nodes, one
  # Of a whole round nothing that travels is as long as a shard's distributions.
  loop = traffic.exchanges(hlo.Program(steps["loop"]().compile().as_text()))
  assert any("Transformer" in one.source for one in loop)
  for one in loop:
    for shape in one.shape:
      assert np.prod(shape, initial=1) < 4096 * BATCH * nodes / 8, one
