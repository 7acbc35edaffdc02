"""Training a drafter: runs that resume, caches, starts, refusals."""

import json

import jax
import numpy as np
import pytest

import specdec
from learned_kinds import head_config
from specdec import checkpoints, drafters
from specdec.checkpoints import conversion, formats
from specdec.checkpoints import learned as saved
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, drafting, hidden, train_drafter
from specdec.training import run as training_run
from specdec.training.setup import from_config
from specdec.utils import files, run_folder
from tiny_training import (
  DECODING,
  SHAPE,
  STEPS,
  log,
  run_program,
  write_letters,
)

TEXT = "the cat sat on the mat and the dog sat on the log while it was hot "
HEAD_CONFIG = dict(kind="mtp", head="shared", levels=2, vocabulary=11, **SHAPE)
OPTIONS = STEPS | dict(
  steps=6, sequence=12, learning_rate=0.02, warmup=1, eval_every=3, save_every=2
)


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
  """A folder with two targets, and texts to learn from."""
  folder = tmp_path_factory.mktemp("place")
  for name, seed in (("target", 0), ("other", 1)):
    write_letters(folder / name, seed)
  (folder / "text").mkdir()
  rng = np.random.default_rng(0)
  for name in "ab":
    words = rng.permutation(TEXT.split() * 12)
    (folder / "text" / name).write_text(" ".join(words))
  (folder / "more").write_text(TEXT * 10)
  (folder / "short").write_text("the cat")
  return folder


def entries(place, **changes):
  shared = dict(
    target=str(place / "target"),
    data=str(place / "text"),
    held_out=str(place / "more"),
    head_config=HEAD_CONFIG,
    loss=dict(divergence="forward_kl"),
    options=OPTIONS,
    decoding=DECODING,
  )
  return shared | changes


def run(place, name, **changes):
  return run_program(place, name, **entries(place, **changes))


def killed_at(monkeypatch, steps):
  """Makes the batches of these steps end the run, each once."""
  left = list(steps)

  def dying(honest):
    def batch(self, step, size):
      if step in left:
        left.remove(step)
        raise KeyboardInterrupt
      return honest(self, step, size)

    return batch

  for sequences in (data.Sequences, hidden.Cached):
    monkeypatch.setattr(sequences, "batch", dying(sequences.batch))


def same(left, right):
  assert log(left) == log(right)
  for name in ("best", "last"):
    paths = [folder / f"{name}.safetensors" for folder in (left, right)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


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
  def test_it_learns_and_is_evaluated_by_decoding(self, whole):
    losses = [x["loss"] for x in log(whole, "train")]
    assert len(losses) == 6 and losses[-1] < losses[0]
    held_out = log(whole, "held_out")
    assert [x["step"] for x in held_out] == [3, 6]
    for name in ("acceptance_1", "agreement_2"):
      assert 0 <= held_out[-1][name] <= 1
    decoded = log(whole, "decoding")
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
    common = target.tokenizer.encode("tea")
    assert set(common) <= set(best.ids.tolist())
    with pytest.raises(ValueError, match="different weights"):
      saved.load(whole / "best.safetensors", checkpoints.load(place / "other"))

  def test_killed_twice_it_ends_the_same_bit_for_bit(
    self, place, whole, monkeypatch
  ):
    # Before anything was saved, and in the middle between two.
    killed_at(monkeypatch, [1, 5])
    for _ in range(2):
      with pytest.raises(SystemExit, match="the same command goes on from her"):
        run(place, "killed")
    same(run(place, "killed"), whole)

  def test_it_continues_another_drafter_with_its_vocabulary(self, place, whole):
    start = whole / "last.safetensors"
    folder = run(
      place,
      "continued",
      start=str(start),
      data=str(place / "more"),
      options=OPTIONS | dict(seed=1),
    )
    first = log(folder, "train")[0]["loss"]
    assert first < log(whole, "train")[0]["loss"]
    before, after = (
      saved.load(path).ids for path in (start, folder / "last.safetensors")
    )
    np.testing.assert_array_equal(before, after)


PUBLISHED = HEAD_CONFIG | dict(layout="published", levels=4)
FOREIGN = {  # in a format that others read
  "speculators": dict(kind="eagle3", features=(0, 1, 2)),
  "eagle": dict(kind="eagle", vocabulary=0),
  "dflash": dict(
    kind="block", vocabulary=0, features=(1,), block=dict(mask_token=3)
  ),
}


@pytest.mark.parametrize("layout, changes", FOREIGN.items())
def test_it_begins_as_a_drafter_in_another_format(
  place, layout, changes, monkeypatch
):
  entry, target = PUBLISHED | changes, checkpoints.load(place / "target")
  ids = np.arange(0, 22, 2) if entry["vocabulary"] else None
  head = drafters.LEARNED[entry["kind"]](
    HeadConfig(**entry), target.config, ids
  )
  net, folder = head.init(jax.random.key(5)), place / layout
  to = conversion.describe_target(str(place / "target"), target.config)
  formats.save(folder, layout, head.head_config, ids, net, to, "float32")
  begun = []
  monkeypatch.setattr(
    training_run, "train", lambda *args, **_: begun.extend(args)
  )
  setup = from_config(entries(place, start=str(folder), head_config=entry))
  train_drafter.train(setup, place / f"from_{layout}")
  run_folder.release()
  jax.tree.map(np.testing.assert_array_equal, begun[0], net)


CACHED = dict(
  head_config=HEAD_CONFIG | dict(kind="eagle3", features=(0, 2), head="own")
)


@pytest.fixture(scope="module")
def cached(place):
  return run(place, "cached", cache=str(place / "states"), **CACHED)


class TestCache:
  def test_loss_and_gradient_are_those_of_the_target_s_pass(
    self, place, cached
  ):
    """But for what bfloat16 takes away."""
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
    eagle3 = head_config("eagle3", 0, features=(0, 2), levels=2)
    head = drafters.LEARNED["eagle3"](eagle3, loaded.config, None, growing)
    objective = drafting.objective(head, model, drafting.Loss())
    net = head.init(jax.random.key(0))
    grade = jax.jit(jax.value_and_grad(objective, has_aux=True))
    (ours, _), (theirs, _) = (
      grade(net, loaded.params, batch),
      grade(net, loaded.params, batch["tokens"]),
    )
    np.testing.assert_allclose(ours[0], theirs[0], rtol=5e-3)
    for name in theirs[1]:
      np.testing.assert_allclose(ours[1][name], theirs[1][name], atol=0.02)

  def test_a_write_that_was_killed_leaves_no_row(self, monkeypatch, tmp_path):
    def replace(*_):
      raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", replace)
    cached = object.__new__(hidden.Cached)
    cached._folder = tmp_path
    with pytest.raises(KeyboardInterrupt):
      cached._write(3, np.zeros(4, np.float16))
    assert not cached._path(3).exists()

  def test_a_resumed_run_reads_and_writes_nothing(
    self, place, cached, monkeypatch
  ):
    def write(*_):
      raise AssertionError("it was there")

    monkeypatch.setattr(hidden.Cached, "_write", write)
    killed_at(monkeypatch, [3])
    again = dict(cache=str(place / "states"), **CACHED)
    with pytest.raises(SystemExit):
      run(place, "again", **again)
    same(run(place, "again", **again), cached)

  def test_states_of_another_dtype_and_damaged_ones_are_refused(self, tmp_path):
    settings = {"model": "1"}, (0,), None
    hidden.run_folder.claim(tmp_path, hidden._settings(*settings, "float32"))
    hidden.run_folder.release()
    hidden.check(tmp_path, *settings)
    with pytest.raises(ValueError, match="dtype: None -> bfloat16"):
      hidden.check(tmp_path, *settings, "bfloat16")
    path = tmp_path / "00000003.npy"
    np.save(path, np.zeros(99))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"00000003\.npy is damaged"):
      files.load_array(path)

  @pytest.mark.parametrize(
    "changed, count",
    [
      ("target.weights", 0),
      ("target.weights", 16),
      ("data", 0),
      ("features", 0),
      ("features", 16),
    ],
  )
  def test_it_refuses_states_of_others_before_it_begins(
    self, place, cached, tmp_path, changed, count
  ):
    """And, where texts are sampled, before they are: they are the data."""
    changes = {
      "target.weights": dict(target=str(place / "other")),
      "data": dict(data=str(place / "more")),
      "features": dict(
        head_config=CACHED["head_config"] | dict(features=(1, 2))
      ),
    }[changed]
    changes |= dict(samples=dict(count=count, prompt=4, temperature=1.0))
    changes = CACHED | dict(cache=str(place / "states")) | changes
    setup = from_config(entries(place, **changes))
    with pytest.raises(ValueError, match=f"states[^ ]* .*{changed}: "):
      train_drafter.train(setup, tmp_path / "run")
    assert not (tmp_path / "run").exists()


BLOCK = dict(slots="next", successor="markov", rank=4, confidence=True)


def learns_and_resumes(place, monkeypatch, kind, k, **changes):
  """Trains, is killed and resumed; returns the folder and the drafter."""
  folder = run(place, kind, **changes)
  losses = [x["loss"] for x in log(folder, "train")]
  assert losses[-1] < losses[0]
  assert log(folder, "decoding")[-1]["tokens_per_pass"] >= 1
  killed_at(monkeypatch, [3])
  with pytest.raises(SystemExit):
    run(place, f"{kind}_killed", **changes)
  same(run(place, f"{kind}_killed", **changes), folder)
  name = f"{kind}({folder / 'last.safetensors'})"
  decoder = specdec.load(str(place / "target"), drafter=name, k=k)
  assert decoder.drafter.name == kind and decoder.drafter_cost.is_complete
  return folder, name


def test_a_block_learns_resumes_and_is_a_drafter(place, monkeypatch):
  """With hidden states from a cache, and anchors that are drawn."""
  changes = dict(
    head_config=HEAD_CONFIG
    | dict(kind="block", features=(0, 2), head="own", block=BLOCK),
    loss=dict(block=dict(anchors=4, confidence_weight=1.0)),
    cache=str(place / "block_states"),
  )
  folder, name = learns_and_resumes(place, monkeypatch, "block", 2, **changes)
  held_out = log(folder, "held_out")[-1]
  assert 0 < held_out["accepted_length"] < 2
  head_config = saved.inspect(folder / "last.safetensors")
  assert head_config.block == BlockConfig(**BLOCK)
  with pytest.raises(ValueError, match="drafts 2 tokens in a row at most"):
    specdec.load(str(place / "target"), drafter=name, k=3)


@pytest.mark.slow
def test_a_parallel_head_learns_resumes_and_is_a_drafter(place, monkeypatch):
  """With mask slots that are drawn."""
  changes = dict(
    head_config=HEAD_CONFIG | dict(kind="peagle", features=(0, 2), head="own"),
    loss=dict(decay=1.0, drop=dict(keep=0.5, least=0.3)),
  )
  folder, _ = learns_and_resumes(place, monkeypatch, "peagle", 3, **changes)
  assert 0 < log(folder, "held_out")[-1]["acceptance_2"] < 1


PLAIN_BLOCK = HEAD_CONFIG | dict(kind="block", features=(0, 2), head="own")
SAMPLES = dict(samples=dict(count=16, prompt=4, temperature=1.0))
REFUSALS = {
  "short data": (dict(data="{place}/short"), "short: the data has 8 tokens"),
  "short held-out": (dict(held_out="{place}/short"), "one sequence takes 13"),
  "feature loss": (
    dict(loss=dict(feature_weight=1.0)),
    "feature_weight = 1.0: a head of kind 'mtp' does not",
  ),
  "vocabulary": (
    dict(head_config=HEAD_CONFIG | dict(vocabulary=28)),
    "vocabulary = 28; the target has 27 tokens",
  ),
  "decoding length": (
    dict(decoding=DECODING | dict(length=99)),
    "decoding.length = 99; a sequence has 1",
  ),
  "start's levels": (
    dict(
      start="{place}/whole/last.safetensors",
      head_config=HEAD_CONFIG | dict(levels=3),
    ),
    "levels: 2 -> 3",
  ),
  "start's target": (
    dict(start="{place}/whole/last.safetensors", target="{place}/other"),
    "different weights",
  ),
  "start's layout": (
    dict(
      start="{place}/whole/last.safetensors",
      head_config=PUBLISHED,
      **SAMPLES,
    ),
    "layout: compact -> published",
  ),
  "start's vocabulary": (
    dict(
      start="{place}/whole/last.safetensors",
      head_config=HEAD_CONFIG | dict(vocabulary=12),
    ),
    "vocabulary: 11 -> 12",
  ),
  "no start": (dict(start="{place}/none"), "no such drafter as .*none"),
  "block's levels": (
    dict(head_config=PLAIN_BLOCK | dict(levels=13)),
    "options.sequence = 12; a draft of head_config.levels takes at least 13",
  ),
  "levels behind the first token": (
    dict(
      head_config=HEAD_CONFIG
      | dict(kind="peagle", layout="published", features=(1,), levels=12)
    ),
    "options.sequence = 12; a draft of head_config.levels takes at least 13",
  ),
  # With samples, which are drawn in the folder.
  "sampled loss": (
    SAMPLES | dict(loss=dict(feature_weight=1.0)),
    "feature_weight = 1.0: a head of kind 'mtp' does not",
  ),
  "sampled k": (
    SAMPLES | dict(head_config=PLAIN_BLOCK, decoding=DECODING | dict(k=3)),
    "3 levels of draft tokens; this block has slots for 2",
  ),
  "sampled length": (
    SAMPLES | dict(decoding=DECODING | dict(length=99)),
    "decoding.length = 99; a sequence has 13",
  ),
  "few samples": (
    dict(samples=SAMPLES["samples"] | dict(count=15)),
    "15 prompts to sample after; at least 16 are needed",
  ),
  "long prompts": (
    dict(samples=SAMPLES["samples"] | dict(prompt=13)),
    "samples.prompt = 13; it must leave room in a sequence of 13 tokens",
  ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_it_refuses_before_it_begins(place, whole, name):
  changes, complaint = REFUSALS[name]
  changes = json.loads(json.dumps(changes).replace("{place}", str(place)))
  with pytest.raises((ValueError, FileNotFoundError), match=complaint):
    setup = from_config(entries(place, **changes))
    train_drafter.train(setup, place / "bad")
  # The mended command may have the folder.
  assert not (place / "bad").exists()


def test_a_cache_is_for_one_process(place, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  setup = from_config(entries(place, cache=str(place / "states")))
  with pytest.raises(ValueError, match="cached by one process, and there are"):
    train_drafter.train(setup, place / "bad", "data:1")
  assert not (place / "bad").exists()


def test_refuses_another_config_in_the_same_folder(place, whole):
  complaint = r"^train: (.|\n)*options\.learning_rate: 0\.02 -> 0\.5"
  with pytest.raises(SystemExit, match=complaint):
    run(place, "whole", options=OPTIONS | dict(learning_rate=0.5))


@pytest.mark.slow
def test_it_learns_from_the_target_s_text(place):
  samples = dict(count=16, prompt=4, temperature=1.0)
  folder = run(place, "samples", samples=samples)
  assert (folder / "last.safetensors").is_file()
  assert (folder / "samples").exists()
