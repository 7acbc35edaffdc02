"""Training on eight virtual devices; run by training_mesh_test.py.

Losses of every step and of held-out texts are one device's, as is what weights
have learned, and a run that is stopped goes on upon another mesh. Every kind of
draft head is trained as train.py trains it: where blocks and mask slots begin
is drawn, and what a kind has has a loss.
"""

import itertools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
import programs
from specdec import checkpoints, sharding
from specdec.checkpoints import learned as saved
from specdec.compiled import lowering, steps
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import (
  ahead,
  data,
  draft_losses,
  drafting,
  evaluate,
  loop,
  objective,
  placing,
  run,
  train_drafter,
  train_joint,
  train_model,
)
from specdec.training.options import Options
from specdec.training.setup import from_config
from specdec.types import PyTree, Source
from tiny_training import DECODING, Killed, log

SHAPE = dict(width=16, mlp_width=32, num_heads=4, num_kv_heads=2, head_dim=8)
SLOW = pytest.mark.slow
OPTIONS = dict(
  steps=4,
  batch=8,
  sequence=10,
  warmup=1,
  learning_rate=1e-3,
  log_every=1,
  eval_every=4,
  save_every=2,
  eval_sequences=12,
)
ONE, DEVICES = "data:1", 8
CONFIG = TransformerConfig(vocab_size=32, num_layers=2, **SHAPE)
READS = dict(features=(0, 2))
PUBLISHED = dict(layout="published", num_layers=0)
HEADS = {
  "eagle": dict(head="shared"),
  "eagle3": dict(vocabulary=11, **READS),
  "published_eagle3": dict(
    kind="eagle3", features=(0, 1, 2), layout="published", vocabulary=16
  ),
  "mtp": dict(head="shared", vocabulary=12),
  "medusa": dict(num_layers=0),
  "hydra": dict(num_layers=0, vocabulary=12),
  "prophet": dict(head="shared"),
  "exit": dict(exit_layer=1),
  "recycle": dict(
    kind="exit", exit_layer=1, feeds_back_hidden=True, vocabulary=12
  ),
  "redrafter": dict(rnn=True, **PUBLISHED),
  "mlp_speculator": dict(scale_input=True, **PUBLISHED),
  "peagle": dict(vocabulary=16, **READS),
  **{  # with heads of their own, of the whole vocabulary
    kind: dict(
      kind="block", block=learned_kinds.head_config(kind).block, **READS
    )
    for kind in learned_kinds.BLOCKS
  },
}
HEADS["dflash"]["vocabulary"] = 11
HEADS["published_block"] |= dict(layout="published", num_layers=2, embed="own")
LOSSES = {
  "eagle": dict(feature_weight=1.0),
  "peagle": dict(drop=dict(keep=0.5, least=0.3)),
  "jetspec": dict(block=dict(weighting="dpace")),
  "rnn": dict(block=dict(at_once=3)),
}
CACHED = "eagle3", "dspark", "recycle"  # their whole runs read hidden states


class Run(NamedTuple):
  """What a run leaves."""

  log: list[dict]
  start: PyTree  # weights of the head
  end: PyTree


def head_entries(head):
  return dict(kind=head, levels=2) | SHAPE | HEADS[head]


def loss_entries(head):
  """In which everything that a head has is trained."""
  losses, block = LOSSES.get(head, {}), HEADS[head].get("block")
  if block:
    selects = block.successor == "selector"
    follows = block.successor != "none" and not selects
    weights = dict(
      anchors=4,
      base_steps=8 if follows else 0,
      base_weight=float(follows),
      confidence_weight=float(block.confidence),
      selector_weight=float(selects),
    )
    losses = losses | dict(block=weights | losses.get("block", {}))
  return dict(divergence="forward_kl") | losses


def killing(patch, stop):
  """Makes the batch of a step kill the run."""
  honest = data.Packed.batch

  def batch(self, step, size):
    if step == stop:
      raise Killed
    return honest(self, step, size)

  patch.setattr(data.Packed, "batch", batch)


def run_head(
  place, folder, head, mesh, ways=None, stop=None, decodes=False, **changes
):
  """Trains a head.

  Args:
    stop: step before which it is killed; None: never.
    decodes: it is evaluated by decoding, too.
  """
  changes = dict(head_config=head_entries(head)) | changes
  setup = entries(
    place, target=str(place / "target"), loss=loss_entries(head), **changes
  )
  honest, weights = run.train, []

  def train(params, *args, **options):
    weights.append(jax.tree.map(np.array, params))
    weights.append(jax.tree.map(np.array, honest(params, *args, **options)))

  with pytest.MonkeyPatch.context() as patch:
    killing(patch, stop)
    patch.setattr(run, "train", train)
    if not decodes:
      patch.setattr(evaluate, "head_by_decoding", without_decoding)
    train_drafter.train(setup, folder, mesh, ways)
  return Run(log(folder), *weights)


def without_decoding(*_):
  return lambda *_: {"tokens": 1.0}


def assert_same(ours, theirs):
  assert len(ours) == len(theirs) > 4
  for one, other in zip(ours, theirs):
    assert one.keys() == other.keys()
    for name in {*one} - {"kind"}:
      np.testing.assert_allclose(
        one[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name
      )


def assert_same_run(ours, theirs):
  """Losses, and weights: far less apart than what they have learned."""
  assert_same(ours.log, theirs.log)
  chex.assert_trees_all_equal(ours.start, theirs.start)

  def check(path, start, end, other):
    learned, apart = (np.linalg.norm(x - end) for x in (start, other))
    assert apart <= 1e-3 * learned, (jax.tree_util.keystr(path), apart, learned)

  jax.tree_util.tree_map_with_path(check, theirs.start, theirs.end, ours.end)


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
  """(head) -> its Run on one device."""
  runs, folder = {}, tmp_path_factory.mktemp("alone")

  def of(head):
    if head not in runs:
      runs[head] = run_head(place, folder / head, head, ONE)
    return runs[head]

  return of


@pytest.mark.parametrize(
  "head, mesh, ways",
  [
    ("published_eagle3", "data:2,model:4", None),
    ("hydra", "data:4,model:2", None),
    pytest.param("dspark", "data:4,model:2", None, marks=SLOW),
    pytest.param("eagle3", "data:2,model:4", 2, marks=SLOW),
    pytest.param("eagle3", "model:4", 2, marks=SLOW),
    pytest.param("eagle3", None, None, marks=SLOW),
    pytest.param("published_eagle3", "data:8", None, marks=SLOW),
    pytest.param("mtp", "data:8", None, marks=SLOW),
    pytest.param("medusa", "data:4,model:2", None, marks=SLOW),
    pytest.param("peagle", "data:8", None, marks=SLOW),
    pytest.param("prophet", "data:4,model:2", 1, marks=SLOW),
    pytest.param("dspark", "data:2,model:4", 1, marks=SLOW),
    pytest.param("dspark", None, None, marks=SLOW),
    pytest.param("domino", "data:2,model:4", 2, marks=SLOW),
    pytest.param("domino", "data:8", None, marks=SLOW),
    pytest.param("dflash2", "data:4,model:2", None, marks=SLOW),
    pytest.param("dflash2", "data:2,model:4", 1, marks=SLOW),
  ],
)
def test_heads_learn_on_eight_devices_as_on_one(
  place, tmp_path, alone, head, mesh, ways
):
  meshed = run_head(place, tmp_path / "run", head, mesh, ways)
  assert_same_run(meshed, alone(head))


@SLOW
def test_microbatches_on_a_mesh_are_one_batch(place, tmp_path, alone):
  """Where blocks begin is drawn for a row of the batch, in whatever part."""
  options = OPTIONS | dict(accumulate=2)
  meshed = run_head(
    place, tmp_path / "run", "dspark", "data:4,model:2", options=options
  )
  assert_same_run(meshed, alone("dspark"))


def test_microbatches_without_a_mesh_are_divided_like_their_batch():
  """Of consecutive rows some devices would have none, and compute all."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  rows, all_of_it = (
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    for axes in (("data",), ())
  )

  def model(params, _, tokens):
    x = jnp.tanh(jax.nn.one_hot(tokens[:, :-1], 32) @ params["map"])
    return jnp.mean(jnp.square(x)), {}

  options = Options(**OPTIONS | dict(accumulate=2, batch=16))
  optimizer = loop.make_optimizer(options)
  state = jax.eval_shape(
    lambda: loop.init({"map": jnp.zeros((32, 16))}, optimizer)
  )
  state = jax.tree.map(lambda x: lowering.shaped(x, all_of_it), state)
  tokens = jax.ShapeDtypeStruct((16, 11), jnp.int32, sharding=rows)
  step = loop.make_step(model, optimizer, options)
  text = step.lower(state, {}, tokens).compile().as_text()
  assert "all-reduce" in text and "all-gather" not in text


MOVES = (
  (ONE, "data:2,model:4"),
  ("data:4,model:2", ONE),
  ("data:2,model:4", "data:8"),
)


@pytest.mark.parametrize(
  "head, first, second",
  [
    ("dspark", ONE, "data:2,model:4"),
    *(
      pytest.param(head, *move, marks=SLOW)
      for head, move in zip(HEADS, itertools.cycle(MOVES))
    ),
  ],
)
def test_a_run_goes_on_upon_another_mesh(
  place, tmp_path, alone, head, first, second
):
  folder = tmp_path / "run"
  with pytest.raises(Killed):
    run_head(place, folder, head, first, stop=3)
  assert [x["step"] for x in log(folder)] == [1, 2, 3]
  assert_same_run(run_head(place, folder, head, second), alone(head))


def test_muon_goes_on_upon_another_mesh(place, tmp_path):
  """A few devices hold parts of matrices that it iterates as wholes."""
  options = OPTIONS | dict(optimizer="muon")
  head, folder = "published_eagle3", tmp_path / "run"
  alone = run_head(place, tmp_path / "alone", head, ONE, options=options)
  with pytest.raises(Killed):
    run_head(place, folder, head, "data:2,model:4", stop=3, options=options)
  meshed = run_head(place, folder, head, "data:4,model:2", options=options)
  assert_same_run(meshed, alone)


@pytest.mark.parametrize("head", ["published_eagle3", "medusa", "dspark"])
def test_a_head_lies_where_its_plan_says(head):
  head_config = HeadConfig(**head_entries(head))
  options = Options(**OPTIONS)
  where = placing.places("data:2,model:4", CONFIG, head_config, options)
  ids = np.arange(head_config.vocabulary) if head_config.vocabulary else None
  serving, unrolled = placing.heads(head_config, CONFIG, ids, where.draft)
  net = placing.put(unrolled, serving.init(jax.random.key(0)), where.draft)
  held = sum(
    4 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(net)
  )
  whole = sum(x.nbytes for x in jax.tree.leaves(net))
  plan = placing.plan(head_config, CONFIG, where)
  assert plan.parts["weights"] == held < whole / 3
  if head == "published_eagle3":
    layer = net["layer_0"]
    parts = {
      name: layer["attention"][name]["weight"].sharding.spec for name in "qko"
    }
    # Two KV heads for four devices: pairs of them share one.
    assert parts == {
      "q": jax.P(("model", "model_2"), None),
      "k": jax.P(("model",), None),
      "o": jax.P(None, ("model", "model_2")),
    }
  again = placing.gathered(net, where.draft)
  for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(net)):
    assert one.sharding.is_fully_replicated
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tokens, own", [(16, 4), (11, 11)])
def test_each_device_projects_its_part_of_a_reduced_vocabulary(tokens, own):
  entries = head_entries("published_eagle3") | dict(vocabulary=tokens)
  head_config, ids = HeadConfig(**entries), np.arange(tokens) * 2
  options = Options(**OPTIONS)
  where = placing.places("data:2,model:4", CONFIG, head_config, options)
  _, head = placing.heads(head_config, CONFIG, ids, where.draft)
  params = transformer.init_params(CONFIG, jax.random.key(0))
  hidden = jax.random.normal(jax.random.key(1), (2, 6, CONFIG.width))
  labels = jnp.zeros((2, 6), jnp.int32)

  def aims(place):
    def run(params, hidden):
      return draft_losses.aim_of_hidden(head, params, hidden, labels, place)

    return jax.jit(run)(params, hidden)

  ours, alone = aims(where.draft), aims(None)
  chex.assert_trees_all_close(ours, alone, atol=1e-5)
  log_probs = ours.log_probs
  assert log_probs.sharding.shard_shape(log_probs.shape)[-1] == own


def bigram(params, frozen, batch):
  """The loss of a table of next tokens, on texts of unequal lengths."""
  del frozen
  logits = params["table"][batch.tokens[:, :-1]]
  loss = objective.text_cross_entropy(logits, batch)
  return loss, {"cross_entropy": loss}


def run_ragged(folder, data_ways):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 7, (40, 11), dtype=np.int32)
  length = rng.integers(1, 11, 40, dtype=np.int32)
  source = Source(tokens, length)  # of which the table knows nothing
  rows = data.Sequences(data.Pairs(source, tokens, length))
  mesh = sharding.make_mesh(data_ways, 1)
  whole = sharding.Placement(mesh, sharding.Rules()).sharding(())
  table = jax.random.normal(jax.random.key(0), (7, 7))
  run.train(
    {"table": table},
    None,
    bigram,
    rows,
    rows,
    Options(**OPTIONS | dict(accumulate=2, batch=16)),
    folder,
    export=lambda *_: None,
    where={"table": whole},
  )
  return log(folder)


def mean_of_devices(values, batch):
  """The bug: every device takes the mean of its own rows, then all do."""
  position = jnp.arange(values.shape[1])
  counts = (position[None] < batch.length[:, None]).astype(values.dtype)
  sums, counts = (
    x.reshape(DEVICES, -1).sum(axis=1) for x in (values * counts, counts)
  )
  return jnp.mean(sums / counts)


def test_a_mean_is_over_all_rows_wherever_they_lie(tmp_path, monkeypatch):
  alone = run_ragged(tmp_path / "alone", 1)
  assert_same(run_ragged(tmp_path / "meshed", 8), alone)
  monkeypatch.setattr(objective, "mean", mean_of_devices)
  with pytest.raises(AssertionError, match="Not equal to tolerance"):
    assert_same(run_ragged(tmp_path / "planted", 8), alone)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with a target, which is also a tokenizer, and a text."""
  folder = tmp_path_factory.mktemp("place")
  (folder / "target").mkdir()
  programs.write_model(folder / "target", vocab_size=32, **SHAPE)
  settings = folder / "target" / "tokenizer_config.json"
  settings.write_text('{"eos_token": "z"}')
  words = ["the", "cat", "sat", "on", "a", "mat"] * 40
  words = np.random.default_rng(0).permutation(words)
  (folder / "text").write_text(" ".join(words))
  return folder


def entries(place, **changes):
  text = str(place / "text")
  shared = dict(data=text, held_out=text, options=OPTIONS, decoding=DECODING)
  return from_config(shared | changes)


def joint(place, **changes):
  return entries(
    place,
    tokenizer=str(place / "target"),
    model=dict(vocab_size=32, num_layers=2, **SHAPE),
    **changes,
  )


JOINT = {
  "mtp": dict(
    head_config=head_entries("mtp") | dict(vocabulary=0),
    loss=dict(divergence="cross_entropy", token_weight=0.3),
  ),
  "layerskip": dict(
    layer_skip=dict(dropout=0.5, rotation=1),
    decoding=DECODING | dict(exit_layer=1),
  ),
}


@pytest.mark.parametrize(
  "kind, decodes",
  [
    ("mtp", False),
    pytest.param("mtp", True, marks=SLOW),
    pytest.param("layerskip", True, marks=SLOW),
  ],
)
def test_joint_training_on_eight_devices_is_that_on_one(
  place, tmp_path, monkeypatch, kind, decodes
):
  if not decodes:
    monkeypatch.setattr(evaluate, "head_by_decoding", without_decoding)
  setup = joint(place, **JOINT[kind])
  logs = []
  for name, mesh in (("alone", ONE), ("meshed", "data:2,model:4")):
    train_joint.train(setup, tmp_path / name, mesh)
    logs.append(log(tmp_path / name))
  assert_same(*reversed(logs))
  if kind == "mtp":  # of one device or of eight, the drafter is its target's
    target = checkpoints.load(tmp_path / "meshed" / "last")
    path = tmp_path / "meshed" / "last" / "drafter.safetensors"
    assert saved.load(path, target).head_config.kind == "mtp"


@SLOW
@pytest.mark.parametrize("head", HEADS)
def test_a_whole_run_with_decoding_and_a_cache(place, tmp_path, head):
  changes = dict(cache=str(tmp_path / "cache")) if head in CACHED else {}
  alone, meshed = (
    run_head(place, tmp_path / name, head, mesh, decodes=True, **changes)
    for name, mesh in (("alone", ONE), ("meshed", "data:2,model:4"))
  )
  assert_same_run(meshed, alone)
  target = checkpoints.load(place / "target")
  first, second = (
    saved.load(tmp_path / name / "last.safetensors", target).net
    for name in ("alone", "meshed")
  )
  # Rounded to bfloat16, which rounds unlike what lies near a tie.
  chex.assert_trees_all_close(first, second, rtol=1e-2, atol=1e-5)


@SLOW
def test_a_draft_learns_from_masks_on_eight_devices_as_on_one(place, tmp_path):
  setup = entries(
    place,
    tokenizer=str(place / "target"),
    target=str(place / "target"),
    model=dict(vocab_size=32, num_layers=1, mask_token=31, **SHAPE),
    loss="forward_kl",
    masks=dict(levels=3),
  )
  logs = []
  for name, mesh in (("alone", None), ("meshed", "data:2,model:4")):
    train_model.load(setup, mesh).train(tmp_path / name)
    logs.append(log(tmp_path / name))
  assert_same(*reversed(logs))


@pytest.mark.parametrize(
  "mesh, options, sentence",
  [
    ("data:8,model:2", {}, "needs 16 devices; there are 8"),
    ("data:3", {}, "mesh = data:3 does not divide the 8 sequences"),
    ("data:8", dict(accumulate=2), "does not divide the 4 sequences"),
    ("model:8", {}, "8 chips do not divide the 4 query heads of the target"),
    ("model:4,rows:2", {}, "'rows:2' is no axis"),
  ],
)
def test_meshes_that_cannot_be_are_refused_before_a_weight_is_read(
  place, tmp_path, monkeypatch, mesh, options, sentence
):
  monkeypatch.setattr(checkpoints, "load", None)
  setup = entries(
    place,
    target=str(place / "target"),
    head_config=head_entries("eagle3"),
    loss=dict(divergence="forward_kl"),
    options=OPTIONS | options,
  )
  with pytest.raises(ValueError, match=sentence):
    train_drafter.train(setup, tmp_path / "run", mesh)
  assert not (tmp_path / "run").exists()
  with pytest.raises(ValueError, match=sentence):
    train_joint.train(
      joint(place, **JOINT["mtp"] | dict(options=OPTIONS | options)),
      tmp_path / "run",
      mesh,
    )


def test_a_head_s_own_heads_must_divide(place, tmp_path):
  three = head_entries("eagle3") | dict(num_heads=6, num_kv_heads=3)
  setup = entries(
    place,
    target=str(place / "target"),
    head_config=three,
    loss=dict(divergence="forward_kl"),
  )
  with pytest.raises(ValueError, match="4 chips do not divide the 6 query he"):
    train_drafter.train(setup, tmp_path / "run", "data:2,model:4")
  where = placing.places(
    "data:2,model:4", CONFIG, setup.head_config, setup.options, draft_ways=1
  )
  assert where.draft.ways("query") == 1


def test_no_weight_of_the_target_is_gathered(place, monkeypatch):
  """What is lowered from shapes has what a real run has."""
  setup = entries(
    place,
    target=str(place / "target"),
    head_config=head_entries("published_eagle3") | dict(levels=1),
    loss=dict(divergence="forward_kl"),
  )

  def compiled():
    step = ahead.step(setup, "data:2,model:4")
    report, _ = steps.compile_step(step.lower, shared_out=step.shared_out)
    plan = step.plan.parts
    held = sum(plan.values()) - plan["gradients"]
    assert report["arguments"] == pytest.approx(held, rel=0.02)
    return report["gathered"]

  assert compiled() == []
  honest = drafting.objective

  def planted(*args, **options):
    compute = honest(*args, **options)

    def objective(net, frozen, tokens):
      whole = jax.sharding.PartitionSpec()
      mesh = sharding.places("data:2,model:4", CONFIG.counts).target.mesh
      frozen = jax.lax.with_sharding_constraint(
        frozen, jax.sharding.NamedSharding(mesh, whole)
      )
      return compute(net, frozen, tokens)

    return objective

  monkeypatch.setattr(drafting, "objective", planted)
  assert {tuple(x["shape"][0]) for x in compiled()} >= {(32, 16), (16, 32)}
