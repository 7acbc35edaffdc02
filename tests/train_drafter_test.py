"""Training a drafter: runs that resume, caches, refusals."""

import json

import jax
import numpy as np
import pytest

import programs
from learned_kinds import head_config
from programs import write_model
from specdec import checkpoints, drafters
from specdec.checkpoints import learned as saved
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, drafting, hidden
from specdec.training import run as training_run
from specdec.utils import files

TEXT = "the cat sat on the mat and the dog sat on the log while it was hot "
HEAD_CONFIG = dict(
  kind="mtp",
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  head="shared",
  levels=2,
  vocabulary=11,
)
OPTIONS = dict(
  steps=6,
  batch=4,
  sequence=12,
  learning_rate=0.02,
  warmup=1,
  log_every=1,
  eval_every=3,
  save_every=2,
  eval_sequences=4,
)
DECODING = dict(k=2, prompts=2, length=4, new_tokens=6, temperature=0.0)


@pytest.fixture(autouse=True, scope="module")
def cache_all_programs():
  """Runs that resume find their programs, however quick to compile."""
  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, 0.0)
  yield
  jax.config.update(name, before)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with a target, and texts to learn from."""
  folder = tmp_path_factory.mktemp("place")
  for name, seed in (("target", 0), ("other", 1)):
    (folder / name).mkdir()
    write_model(folder / name, seed)
    (folder / name / "tokenizer_config.json").write_text('{"eos_token": "z"}')
  (folder / "text").mkdir()
  rng = np.random.default_rng(0)
  for name in "ab":
    words = rng.permutation(TEXT.split() * 12)
    (folder / "text" / name).write_text(" ".join(words))
  (folder / "more").write_text(TEXT * 10)
  (folder / "short").write_text("the cat")
  (folder / "empty").mkdir()
  return folder


def entries(place, **changes):
  return (
    dict(
      target=str(place / "target"),
      data=str(place / "text"),
      held_out=str(place / "more"),
      head_config=HEAD_CONFIG,
      loss=dict(divergence="forward_kl"),
      options=OPTIONS,
      decoding=DECODING,
    )
    | changes
  )


def run(place, name, **changes):
  """The program, in place/name; returns that folder."""
  config = place / f"{name}.py"
  config.write_text(
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    f"  return config_dict.ConfigDict({entries(place, **changes)!r})\n"
  )
  folder = place / name
  programs.run("train_drafter", f"--config={config}", f"--folder={folder}")
  return folder


def refused(place, name, **changes) -> str:
  with pytest.raises(SystemExit) as error:
    run(place, name, **changes)
  return str(error.value)


def killed_at(monkeypatch, steps):
  """Batches that end the run at these steps, each once."""
  left = list(steps)

  def dying(honest):
    def batch(self, step, size):
      if step in left:
        left.remove(step)
        raise KeyboardInterrupt
      return honest(self, step, size)

    return batch

  for who in (data.Sequences, hidden.Cached):
    monkeypatch.setattr(who, "batch", dying(who.batch))


def lines(folder, kind=None):
  found = (folder / "metrics.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in found]
  return [x for x in found if kind in (None, x["kind"])]


def same(left, right):
  assert lines(left) == lines(right)
  for name in ("best", "last"):
    found = [f / f"{name}.safetensors" for f in (left, right)]
    assert found[0].read_bytes() == found[1].read_bytes()


@pytest.fixture(scope="module")
def whole(place):
  """A run, in which the drafter's weights are changed and no others."""
  honest = training_run.train

  def train(params, frozen, *rest, **options):
    before = jax.tree.map(np.array, frozen)
    after = honest(params, frozen, *rest, **options)
    jax.tree.map(np.testing.assert_array_equal, frozen, before)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), after, params)
    assert all(jax.tree.leaves(moved))
    return after

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(training_run, "train", train)
    return run(place, "whole")


class TestRun:
  def test_it_learns_and_says_what_it_is_worth(self, place, whole):
    losses = [x["loss"] for x in lines(whole, "train")]
    assert len(losses) == 6 and losses[-1] < losses[0]
    held_out = lines(whole, "held_out")
    assert [x["step"] for x in held_out] == [3, 6]
    for name in ("acceptance_1", "agreement_2"):
      assert 0 <= held_out[-1][name] <= 1
    decoded = lines(whole, "decoding")
    assert len(decoded) == 2 and decoded[-1]["tokens_per_pass"] >= 1
    (file,) = (whole / "tensorboard").iterdir()
    assert b"decoding/tokens_per_pass" in file.read_bytes()

  def test_its_files_are_drafters_of_this_target(self, place, whole):
    target = checkpoints.load(place / "target")
    best, last = (
      saved.load(whole / f"{name}.safetensors", target)
      for name in ("best", "last")
    )
    assert best.head_config == last.head_config == head_config("mtp", levels=2)
    assert best.ids.tolist() == last.ids.tolist() and len(best.ids) == 11
    common = checkpoints.load(place / "target").tokenizer.encode("tea")
    assert set(common) <= set(best.ids.tolist())
    with pytest.raises(ValueError, match="different weights"):
      saved.load(whole / "best.safetensors", checkpoints.load(place / "other"))

  def test_killed_twice_it_ends_the_same_bit_for_bit(
    self, place, whole, monkeypatch
  ):
    # Before anything was saved, and in the middle between two.
    killed_at(monkeypatch, [1, 5])
    for _ in range(2):
      said = refused(place, "killed")
      assert "the same command goes on from here" in said
    same(run(place, "killed"), whole)

  def test_it_goes_on_from_another_drafter(self, place, whole):
    """On other text: what it may draft stays."""
    start = whole / "last.safetensors"
    folder = run(
      place,
      "on",
      start=str(start),
      data=str(place / "more"),
      options=OPTIONS | dict(seed=1),
    )
    first = lines(folder, "train")[0]["loss"]
    assert first < lines(whole, "train")[0]["loss"]
    before, after = (
      saved.load(path).ids for path in (start, folder / "last.safetensors")
    )
    np.testing.assert_array_equal(before, after)

  def test_what_is_not_finite_stops_it(self, place):
    wild = OPTIONS | dict(learning_rate=1e38, clip=1e38)
    said = refused(place, "wild", options=wild)
    assert "not finite at step" in said


CACHED = dict(
  head_config=HEAD_CONFIG | dict(kind="eagle3", features=(0, 2), head="own")
)


@pytest.fixture(scope="module")
def cached(place):
  return run(place, "cached", cache=str(place / "states"), **CACHED)


class TestCache:
  @pytest.mark.slow
  def test_states_from_disk_train_as_those_on_the_fly(self, place, cached):
    # Not the very same: rows of a cache are cut alike in every epoch.
    fresh = lines(run(place, "fresh", **CACHED), "held_out")
    for ours, theirs in zip(lines(cached, "held_out"), fresh):
      assert abs(ours["loss"] - theirs["loss"]) < 0.01
      assert abs(ours["acceptance_1"] - theirs["acceptance_1"]) < 0.01

  def test_a_batch_says_what_the_target_says(self, place, cached):
    """Loss and gradient, but for what bfloat16 takes away."""
    loaded = checkpoints.load(place / "target")
    model = transformer.model(loaded.config)
    rows = data.Packed(
      data.tokenize(data.read(place / "text"), loaded.tokenizer), 12
    )
    states = hidden.Cached(
      rows,
      model,
      loaded.params,
      (0, 2),
      place / "states",
      saved.fingerprint(loaded),
    )
    batch = states.batch(0, 4)
    made = head_config("eagle3", 0, features=(0, 2), levels=2)
    head = drafters.LEARNED["eagle3"](made, loaded.config, None, growing)
    aim = drafting.objective(head, model, drafting.Loss())
    net = head.init(jax.random.key(0))
    grade = jax.jit(jax.value_and_grad(aim, has_aux=True))
    (ours, _), (theirs, _) = (
      grade(net, loaded.params, batch),
      grade(net, loaded.params, batch["tokens"]),
    )
    np.testing.assert_allclose(ours[0], theirs[0], rtol=5e-3)
    for name in theirs[1]:
      np.testing.assert_allclose(ours[1][name], theirs[1][name], atol=0.02)

  def test_what_is_there_is_read_and_not_made(self, place, cached, monkeypatch):
    def write(*_):
      raise AssertionError("it was there")

    monkeypatch.setattr(hidden.Cached, "_write", write)
    killed_at(monkeypatch, [3])
    again = dict(cache=str(place / "states"), **CACHED)
    refused(place, "again", **again)
    same(run(place, "again", **again), cached)

  @pytest.mark.parametrize(
    "changes, named",
    [
      (dict(target="{place}/other"), "target.weights: "),
      (dict(data="{place}/more"), "data: "),
      (
        dict(head_config=CACHED["head_config"] | dict(features=(1, 2))),
        "features: ",
      ),
    ],
    ids=["target", "data", "features"],
  )
  def test_it_refuses_another(self, place, cached, changes, named):
    changes = json.loads(json.dumps(changes).replace("{place}", str(place)))
    changes = CACHED | dict(cache=str(place / "states")) | changes
    name = f"refused_{named.split('.')[0].strip(': ')}"
    said = refused(place, name, **changes)
    assert "states" in said and named in said

  def test_a_write_that_was_killed_leaves_no_row(
    self, place, monkeypatch, tmp_path
  ):
    def replace(*_):
      raise KeyboardInterrupt

    folder = tmp_path / "states"
    monkeypatch.setattr(files.os, "replace", replace)
    cached = object.__new__(hidden.Cached)
    cached._folder = folder
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
      cached._write(3, np.zeros(4, np.float16))
    assert not cached._path(3).exists()


REFUSALS = {
  "empty": (dict(data="{place}/empty"), "empty has no text"),
  "absent": (dict(data="{place}/absent"), "absent does not exist"),
  "short": (dict(data="{place}/short"), "short: the data has 8 tokens; one "),
  "short_held_out": (
    dict(held_out="{place}/short"),
    "one sequence takes 13",
  ),
  "unknown": (dict(speed="high"), "the config sets speed; accepted: target, "),
  "lacking": (
    dict(decoding=dict(k=2)),
    "lacks decoding.length, decoding.new_tokens",
  ),
  "none": (dict(loss=None), "lacks loss"),
  "head_entry": (
    dict(head_config=HEAD_CONFIG | dict(colour=1)),
    "sets head_config.colour; accepted: kind, ",
  ),
  "loss_entry": (dict(loss=dict(colour=1)), "the config sets loss.colour; "),
  "options_entry": (
    dict(options=OPTIONS | dict(colour=1)),
    "the config sets options.colour; accepted: steps, ",
  ),
  "options_type": (
    dict(options=OPTIONS | dict(steps="many")),
    "the config cannot be used: '<' not supported",
  ),
  "kind": (
    dict(head_config=HEAD_CONFIG | dict(kind="beagle")),
    "kind 'beagle' is",
  ),
  "law": (
    dict(loss=dict(divergence="hinge")),
    "divergence 'hinge' is unknown; known: ",
  ),
  "decay": (dict(loss=dict(decay=-1.0)), "decay = -1.0; it must be >= 0"),
  "feature_loss": (
    dict(loss=dict(feature_weight=1.0)),
    "feature_weight = 1.0: a head of kind 'mtp' does not",
  ),
  "layers": (
    dict(head_config=HEAD_CONFIG | dict(kind="eagle3", features=(1, 3))),
    "features asks for layers 3; this target has 2",
  ),
  "exit": (
    dict(head_config=HEAD_CONFIG | dict(kind="exit", exit_layer=2)),
    "exit_layer = 2; this target has 2 layers",
  ),
  "wide": (
    dict(head_config=HEAD_CONFIG | dict(vocabulary=28)),
    "vocabulary = 28; the target has 27 tokens",
  ),
  "prompts": (dict(decoding=DECODING | dict(prompts=0)), "prompts = 0; it "),
  "cold": (
    dict(decoding=DECODING | dict(temperature=-1.0)),
    "decoding.temperature = -1.0; it must be >= 0",
  ),
  "beginning": (
    dict(decoding=DECODING | dict(length=99)),
    "decoding.length = 99; a sequence has 1",
  ),
  "heads": (
    dict(
      head_config=HEAD_CONFIG | dict(kind="medusa", num_layers=0),
      decoding=DECODING | dict(k=3),
    ),
    "3 levels of draft tokens; this medusa has 2 heads",
  ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_it_refuses_before_it_begins(place, name):
  changes, complaint = REFUSALS[name]
  changes = json.loads(json.dumps(changes).replace("{place}", str(place)))
  said = refused(place, f"bad_{name}", **changes)
  assert said.startswith("train_drafter: ") and complaint in said
  # Nothing was begun: the mended command may have the folder.
  assert not (place / f"bad_{name}").exists()


def test_a_start_that_does_not_fit(place, whole):
  start = str(whole / "last.safetensors")
  for name, changes, complaint in (
    (
      "start_1",
      dict(head_config=HEAD_CONFIG | dict(levels=3)),
      "levels: 2 -> 3",
    ),
    ("start_3", dict(target=str(place / "other")), "different weights"),
    ("start_4", dict(start=str(place / "none")), "none does not exist"),
  ):
    said = refused(place, name, **dict(start=start) | changes)
    assert complaint in said, said
    assert not (place / name).exists()


def test_another_config_in_the_same_folder(place, whole):
  said = refused(place, "whole", options=OPTIONS | dict(learning_rate=0.5))
  assert "options.learning_rate: 0.02 -> 0.5" in said
  assert "head_config.levels: 2 -> 3" in refused(
    place, "whole", head_config=HEAD_CONFIG | dict(levels=3)
  )


@pytest.mark.slow
def test_the_targets_own_texts(place):
  samples = dict(count=16, prompt=4, temperature=1.0)
  folder = run(place, "samples", samples=samples)
  assert (folder / "last.safetensors").is_file()
  assert (folder / "samples").exists()
