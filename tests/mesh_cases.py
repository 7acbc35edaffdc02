"""Eight devices write what one writes; run by mesh_test.py, which gives this
file a process with eight virtual devices.

Every drafter that a rule is right for, on one mesh each: the whole matrix is
slow. What is not has every kind of drafter, every rule and every kind of draft
head, each mesh several times, and drafts laid out like the target and on fewer
chips. A batch has greedy and sampled rows, but for the rule that is greedy;
their texts and their rounds are one device's. Of a draft head weights and cache
lie whole on every chip, but for the rows of a batch.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import numpy as np
import pytest

import learned_kinds
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
from specdec.drafters import suffix_index
from specdec.drafters.heads import draft_head as draft_heads
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.types import Params, Skip, Source

BATCH, PROMPT, LENGTH, K, EOS = 8, 6, 18, 2, (3,)
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
IDS = np.arange(0, 64, 2)
PLAIN = "baseline", "baseline"  # drafter and rule
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
SLOW = pytest.mark.slow

PATHS = draft_tree.from_paths([(0,), (1,), (0, 0)])
CHAINS = draft_shape.static(draft_tree.parallel(2, K), "iid")
STATIC = draft_shape.static(PATHS)
DYNAMIC = draft_shape.dynamic(2, 2, 4)
DRAFTERS = {  # (target, draft) -> Drafter
  "baseline": lambda *_: decode.NO_DRAFTER,
  "lookup": lambda *_: drafters.lookup(K, min_ngram=1),
  "corpus": lambda *_: drafters.suffix(
    shape=DYNAMIC, corpus=True, min_match=1, factor=2.0
  ),
  "recycling": lambda target, _: drafters.recycling(
    target.vocab_size, shape=STATIC
  ),
  "suffix": lambda *_: drafters.suffix(K, min_match=1),
  "model": lambda _, draft: drafters.model(draft, K),
  "early_exit": lambda target, _: drafters.early_exit(target, 1, K),
  "layer_skip": lambda target, _: drafters.layer_skip(
    target, Skip((0,), (1,)), K, drafters.Threshold(0.2)
  ),
  "chains": lambda _, draft: drafters.model(draft, shape=CHAINS),
  "tree": lambda _, draft: drafters.model(draft, shape=STATIC),
  "points": lambda _, draft: drafters.model(
    draft, shape=draft_shape.static(PATHS, "deterministic")
  ),
  "dynamic": lambda _, draft: drafters.model(draft, shape=DYNAMIC),
  "pard": lambda _, draft: drafters.pard(draft, 3, shape=STATIC),
  "exit_tree": lambda target, _: drafters.early_exit(target, 1, shape=STATIC),
  "exit_dynamic": lambda target, _: drafters.early_exit(
    target, 1, shape=DYNAMIC
  ),
}
HEAD_SHAPES = {
  "chain": draft_shape.chain(3),
  "tree": STATIC,
  "dynamic": DYNAMIC,
  "copies": draft_shape.chain(2),  # after a lookup
}
COPIED = 4  # draft tokens of a lookup, more than the head after it drafts
HEAD_KINDS = (*learned_kinds.KINDS, "peagle", "dflash2", "dspark")
HEADS = [
  f"{kind} {shape}"
  for kind, shape in itertools.product(HEAD_KINDS, HEAD_SHAPES)
  if not (shape == "copies" and learned_kinds.head_config(kind).exits)
]
# Of all blocks: those that draft all tokens, and chains.
BLOCKS = [
  f"{kind} {shape}"
  for kind, shape in itertools.product(
    learned_kinds.BLOCKS, ("chain", *(f"{x} whole" for x in HEAD_SHAPES))
  )
  if f"{kind} {shape}" not in HEADS
]
RULES = {
  "baseline": decode.NO_DRAFT_RULE,
  "coupled": acceptance.coupled(),
  "naive": acceptance.naive(),
  "greedy": acceptance.greedy(),
  "rejection": acceptance.rejection(),
  "block": acceptance.block(),
  "kseq": acceptance.kseq(),
  "typical": acceptance.typical(),
  "lenience": acceptance.lenience(0.5),
  "relaxed": acceptance.relaxed(3, 0.2),
}
DUE = [  # (drafter, rule, (data, model)), and whether the draft has fewer chips
  ("baseline", "baseline", (4, 2), False),
  ("lookup", "greedy", (1, 8), False),
  ("model", "rejection", (1, 8), True),
  ("early_exit", "block", (2, 4), False),
  ("chains", "kseq", (2, 4), True),
  ("dynamic", "coupled", (8, 1), False),
  ("eagle chain", "rejection", (2, 4), True),
  ("mtp dynamic", "coupled", (1, 8), True),
  ("prophet tree", "rejection", (8, 1), True),
  ("eagle3 copies", "rejection", (2, 4), True),
  ("domino chain whole", "coupled", (2, 4), True),
  ("dflash2 chain whole", "rejection", (1, 8), True),
]


def is_head(drafter):
  return drafter not in DRAFTERS


def lying(mesh, less=False, head=False, shared=1) -> sharding.Places:
  """Where target and draft lie; less: the draft on half of the chips; shared:
  over how many a head is."""
  data, model = mesh
  counts = learned_kinds.head_config("mtp").counts if head else None
  ways = shared if head else max(1, model // 2) if less else model
  text = f"data:{data},model:{model}"
  return sharding.places(text, TARGET.counts, counts or DRAFT.counts, ways)


def models_of(where=None, vocab_size=64):
  configs = [
    dataclasses.replace(c, vocab_size=vocab_size) for c in (TARGET, DRAFT)
  ]
  return configs, [
    transformer.model(config, place)
    for config, place in zip(configs, where or (None, None))
  ]


def head_of(name, config, place=None):
  """Kinds with a head of their own draft some tokens unless they are said to
  draft the whole vocabulary, the others all."""
  kind, _, *size = name.split()
  few = learned_kinds.head_config(kind).head == "own" and size != ["whole"]
  layers = {"features": (1, 2)} if kind.endswith("eagle3") else {}
  if kind in (*learned_kinds.BLOCKS, *learned_kinds.PARALLEL):
    layers = {"features": (1, 2), "num_heads": 2}
  if kind in ("recycle", "head"):
    layers = {"exit_layer": 1}
  return learned_kinds.draft_head(kind, not few, place, config, IDS, **layers)


def drafter_of(name, models, config=TARGET, where=None):
  if name in DRAFTERS:
    return DRAFTERS[name](*models)
  target, draft = where or (None, None)
  head, shape = head_of(name, config, draft), name.split()[1]
  copied = COPIED if shape == "copies" else 0
  drafter = drafters.from_head(
    head, models[0], HEAD_SHAPES[shape], target, copied
  )
  if copied:
    first = drafters.lookup(copied, min_ngram=1)
    drafter = drafters.fallback(first, drafter)
  return drafter


def fits(drafter, rule):
  _, models = models_of()
  try:
    decode.check_pair(drafter_of(drafter, models).spec, RULES[rule])
  except ValueError:
    return False
  return True


def matrix():
  """Every drafter under every rule, heads under two; the meshes take turns."""
  pairs = [*itertools.product(list(DRAFTERS)[1:], list(RULES)[1:])]
  pairs += itertools.product(HEADS + BLOCKS, ("coupled", "rejection"))
  due = {case[:2] for case in DUE}
  rest = [
    (*pair, MESHES[(number + number // 4) % 4], number % 2 == 1)
    for number, pair in enumerate(x for x in pairs if fits(*x))
    if pair not in due
  ]
  return [*DUE, *(pytest.param(*case, marks=SLOW) for case in rest)]


@functools.cache
def weights(drafter="model"):
  """Sharpened, so that distributions are far from flat and texts have few
  near-ties."""
  target, draft = (
    learned_kinds.sharpened(
      transformer.init_params(config, jax.random.key(i)), 6
    )
    for i, config in enumerate((TARGET, DRAFT))
  )
  if drafter == "corpus":
    rows = np.random.default_rng(0).integers(0, 64, (40, 20))
    index = suffix_index.build([*rows, *np.asarray(one_device(*PLAIN).tokens)])
    draft = jax.tree.map(np.asarray, index)
  if is_head(drafter):
    head = head_of(drafter, TARGET)
    net = learned_kinds.sharpened(head.init(jax.random.key(1)), 6)
    draft = draft_heads.weights_of(head, net, target)
  return Params(target, draft)


def put(params, config, place):
  return jax.device_put(params, model_params.shardings(config, place))


def decoded(drafter, rule, where=None, decoding=decode.generate, **options):
  """The state of eight prompts, every other row sampled unless greedy."""
  _, models = models_of(where)
  whole = is_head(drafter) or drafter == "corpus"
  target, draft = weights(drafter if whole else "model")
  if where:
    target = put(target, TARGET, where.target)
    if is_head(drafter):
      head = head_of(drafter, TARGET, where.draft)
      lies = draft_heads.shardings(head, draft, where.draft)
      draft = jax.device_put(draft, lies)
    elif whole:
      draft = jax.device_put(draft, where.target.sharding(()))
    else:
      draft = put(draft, DRAFT, where.draft)
    options["mesh"] = where
  rng = np.random.default_rng(0)
  temperature = np.arange(BATCH) % 2 * (rule != "greedy")
  return decoding(
    models[0],
    drafter_of(drafter, models, where=where),
    RULES[rule],
    Params(target, draft),
    rng.integers(0, 64, (BATCH, PROMPT), dtype=np.int32),
    rng.integers(1, PROMPT + 1, BATCH, dtype=np.int32),
    jax.random.key(7),
    max_length=LENGTH,
    sampling=sampling.settings(BATCH, temperature),
    eos_ids=EOS,
    **options,
  )


one_device = functools.cache(decoded)


def assert_same(state, alone):
  lengths = np.asarray(alone.length)
  np.testing.assert_array_equal(state.length, lengths)
  committed = np.arange(LENGTH) < lengths[:, None]
  ours, theirs = (np.asarray(x.tokens)[committed] for x in (state, alone))
  np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_array_equal(state.stats.rounds, alone.stats.rounds)
  np.testing.assert_array_equal(state.stats.accepted, alone.stats.accepted)


@pytest.mark.parametrize("drafter, rule, mesh, less", matrix(), ids=str)
def test_eight_devices_write_what_one_writes(drafter, rule, mesh, less):
  state = decoded(drafter, rule, lying(mesh, less, is_head(drafter)))
  assert_same(state, one_device(drafter, rule))
  rows = BATCH // mesh[0]
  assert state.tokens.sharding.shard_shape(state.tokens.shape)[0] == rows
  key, _ = state.target_cache.layers[0]
  heads = max(1, TARGET.num_kv_heads // mesh[1])
  assert key.sharding.shard_shape(key.shape)[:2] == (rows, heads)
  draft_state = getattr(state.draft_state, "other", state.draft_state)
  if drafter in ("corpus", "recycling"):
    assert state.stats.accepted.sum() > 0
  if is_head(drafter):
    assert state.stats.drafted.sum() > 0
    heads = learned_kinds.head_config("mtp").num_kv_heads  # whole
  elif drafter == "model":
    chips = max(1, mesh[1] // 2) if less else mesh[1]
    heads = max(1, DRAFT.num_kv_heads // chips)
  else:
    return
  cache = getattr(draft_state, "cache", draft_state)
  for buffer in jax.tree.leaves(cache.layers):
    assert buffer.sharding.shard_shape(buffer.shape)[:2] == (rows, heads)


def shared_out():
  """Yields every kind in one of its shapes; most are slow."""
  for number, kind in enumerate((*HEAD_KINDS, *learned_kinds.BLOCKS)):
    names = [x for x in HEADS + BLOCKS if x.split()[0] == kind]
    rule = ("coupled", "rejection")[number % 2]
    mesh = ((4, 2), (2, 4))[number // 2 % 2]
    quick = kind in ("eagle3", "domino")
    name = names[number % len(names)]
    yield pytest.param(name, rule, mesh, marks=() if quick else SLOW)


@pytest.mark.parametrize("drafter, rule, mesh", [*shared_out()], ids=str)
def test_a_head_may_be_shared_out(drafter, rule, mesh):
  where = lying(mesh, head=True, shared=2)
  _, draft = weights(drafter)
  head = head_of(drafter, TARGET, where.draft)
  parts = jax.tree.leaves(draft_heads.shardings(head, draft, where.draft))
  assert sum(not part.is_fully_replicated for part in parts) > 0
  state = decoded(drafter, rule, where)
  assert_same(state, one_device(drafter, rule))
  assert state.stats.drafted.sum() > 0


@pytest.mark.parametrize("mesh", [(2, 4), pytest.param((8, 1), marks=SLOW)])
def test_an_encoder_decoder_writes_what_it_writes_on_one_device(mesh):
  """Ragged sources; the draft is the target, somewhat changed."""
  config = dataclasses.replace(learned_kinds.T5, vocab_size=64)
  target = learned_kinds.sharpened(
    transformer.init_params(config, jax.random.key(0)), 4
  )
  draft = jax.tree.map(
    lambda x: x + 0.02 * jax.random.normal(jax.random.key(1), x.shape), target
  )
  rng = np.random.default_rng(0)
  source = Source(
    rng.integers(0, 64, (BATCH, 9), dtype=np.int32),
    rng.integers(1, 10, BATCH, dtype=np.int32),
  )

  def decoded(where=None):
    model, other = (
      transformer.model(config, place) for place in where or (None, None)
    )
    params, options = (target, draft), {}
    if where:
      params = (put(x, config, p) for x, p in zip(params, where))
      options["mesh"] = where
    return decode.generate(
      model,
      drafters.model(other, K),
      RULES["rejection"],
      Params(*params),
      np.zeros((BATCH, 1), np.int32),
      np.ones((BATCH,), np.int32),
      jax.random.key(7),
      max_length=LENGTH,
      sampling=sampling.settings(BATCH, np.arange(BATCH) % 2),
      source=source,
      **options,
    )

  text = f"data:{mesh[0]},model:{mesh[1]}"
  state = decoded(sharding.places(text, config.counts, config.counts))
  assert_same(state, decoded())
  assert state.stats.accepted.sum() > 0
  key, _ = state.target_cache.cross.layers[0]
  part = BATCH // mesh[0], config.num_heads // mesh[1]
  assert key.sharding.shard_shape(key.shape)[:2] == part


def test_a_stream_on_a_mesh_and_a_loop_of_calls_compiles_once(monkeypatch):
  where, alone = lying((2, 4), less=True), one_device("model", "block")
  traced = chex.assert_max_traces(step.decode_step, n=1)
  monkeypatch.setattr(step, "decode_step", traced)
  states = [decoded("model", "block", where) for _ in range(2)]
  *_, streamed = decoded("model", "block", where, decode.stream, every=3)
  for state in (*states, streamed):
    assert state.tokens.sharding.mesh == where.target.mesh
    assert_same(state, alone)


def test_a_mesh_needs_weights_that_lie_on_it_and_rows_that_divide():
  where = lying((2, 4)).target
  model, target = transformer.model(TARGET, where), weights().target

  def autoregress(params, rows):
    return decode.autoregress(
      model,
      Params(params),
      np.zeros((rows, PROMPT), np.int32),
      np.full(rows, PROMPT, np.int32),
      jax.random.key(7),
      max_length=LENGTH,
      sampling=sampling.settings(rows),
      mesh=where,
    )

  with pytest.raises(ValueError, match="does not lie on the mesh"):
    autoregress(target, BATCH)
  with pytest.raises(ValueError, match="3 rows over data:2"):
    autoregress(put(target, TARGET, where), 3)


def test_each_device_reads_its_own_part(tmp_path, monkeypatch):
  """Of safetensors: what is asked for is what a device holds, and no more."""
  params = transformer.init_params(TARGET, jax.random.key(0))
  checkpoints.save_safetensors(tmp_path, params, TARGET)
  (tmp_path / "tokenizer_config.json").write_text("{}")
  place = lying((2, 4)).target
  sizes, read = {}, huggingface.Weights.read

  def noted(self, name, *rest):
    array = read(self, name, *rest)
    sizes[name] = array.size
    return array

  monkeypatch.setattr(huggingface.Weights, "read", noted)
  loaded = checkpoints.load(tmp_path, place=place).params
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  whole = model_params.shardings(TARGET, place)
  assert jax.tree.map(lambda x: x.sharding, loaded) == whole
  gate = sizes["model.layers.0.mlp.gate_proj.weight"]
  assert gate == TARGET.mlp_width * TARGET.width // 4
  assert sizes["model.embed_tokens.weight"] == 64 * TARGET.width // 4


def exchanges(step):
  """What devices tell each other in a step that was lowered."""
  return traffic.exchanges(hlo.Program(step.compile().as_text()))


@pytest.mark.parametrize(
  "drafter, rule, draft_ways",
  [
    ("model", "rejection", 1),
    pytest.param("model", "coupled", 4, marks=SLOW),
    pytest.param("tree", "rejection", 8, marks=SLOW),
    pytest.param("model", "block", 4, marks=SLOW),
    pytest.param("chains", "kseq", 4, marks=SLOW),
    pytest.param("tree", "typical", 4, marks=SLOW),
    ("lookup", "greedy", 4),
    ("eagle chain", "rejection", 1),
    pytest.param("model", "rejection", 4, marks=SLOW),
    pytest.param("model", "rejection", 8, marks=SLOW),
    pytest.param("eagle copies", "rejection", 1, marks=SLOW),
    pytest.param("recycle tree", "rejection", 1, marks=SLOW),
    pytest.param("prophet tree", "rejection", 1, marks=SLOW),
    pytest.param("hydra chain", "rejection", 1, marks=SLOW),
    pytest.param("dspark chain whole", "rejection", 1, marks=SLOW),
    pytest.param("domino tree whole", "rejection", 1, marks=SLOW),
    pytest.param("dflash2 chain whole", "rejection", 1, marks=SLOW),
  ],
)
def test_no_distribution_travels(drafter, rule, draft_ways):
  """What eight shards of the vocabulary tell each other to accept is O(B N)
  numbers; nothing in a round is as long as a shard's distributions."""
  head = is_head(drafter)
  counts = learned_kinds.head_config("mtp").layers.counts if head else None
  where = sharding.places(
    "model:8", TARGET.counts, counts or DRAFT.counts, draft_ways
  )
  configs, models = models_of(where, vocab_size=4096)
  drafts = drafter_of(drafter, models, configs[0], where)
  if head:
    target = lowering.weights(configs[0], where.target)
    params = Params(
      target,
      lowering.head_weights(
        head_of(drafter, configs[0], where.draft), target, where.target
      ),
    )
  else:
    params = Params(*map(lowering.weights, configs, where))
  settings = sampling.settings(
    BATCH, 0.0 if rule == "greedy" else 1.0, top_p=0.9, top_k=50
  )
  steps = lowering.steps(
    models[0],
    drafts,
    RULES[rule],
    params,
    lowering.inputs(BATCH, PROMPT, settings, where),
    LENGTH,
    where,
  )
  nodes = drafts.spec.max_nodes
  accept = exchanges(steps["accept"]())
  assert accept, "eight shards must tell each other something"
  for one in accept:
    for shape in one.shape:
      # One number a shard of every node is what an argmax gathers.
      assert np.prod(shape, initial=1) <= 16 * BATCH * nodes, one
  loop = exchanges(steps["loop"]())
  assert any("Transformer" in one.source for one in loop)
  for one in loop:
    for shape in one.shape:
      assert np.prod(shape, initial=1) < 4096 * BATCH * nodes / 8, one
