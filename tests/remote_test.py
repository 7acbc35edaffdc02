"""Outputs in an object store: what is written whole, what a kill leaves."""

import gc
import importlib.util
import io
import json
import os
import shutil

import numpy as np
import pytest

import fake_bucket
import programs
import tiny_training
from learned_kinds import head_config
from specdec import checkpoints
from specdec.checkpoints import fetch as fetching
from specdec.checkpoints import learned, shipped
from specdec.models import transformer
from specdec.training import data, objective, saving
from specdec.training.log import Log
from specdec.utils import files, remote, run_folder
from tiny_training import SHAPE, STEPS


@pytest.fixture
def bucket(monkeypatch, tmp_path):
  """A store; whatever a program wrote here instead would be noticed."""
  (tmp_path / "here").mkdir()
  monkeypatch.chdir(tmp_path / "here")
  with fake_bucket.bucket(monkeypatch) as store:
    yield store
  run_folder.release()
  assert os.listdir(tmp_path / "here") == []


def names(store, folder):
  """Names of the objects below a folder."""
  start = f"{folder}/"
  return [x.removeprefix(start) for x in store.objects if x.startswith(start)]


@pytest.mark.parametrize(
  "path, sentence",
  [
    ("s3://bucket/run", r"nothing is written to s3://; accepted: gs://"),
    ("memory://run", r"nothing is written to memory://"),
    ("gs:///run", "should be gs://BUCKET/NAME"),
    ("gs:/bucket/run", "has no //, as in gs://bucket"),
    ("s3:bucket", "has no //, as in gs://bucket"),
    ("gs://bucket/", "should be gs://BUCKET/NAME"),
    ("gs://bucket/run", r"needs gcsfs, .* `pip install specdec-jax\[gcs\]`"),
  ],
)
def test_what_cannot_be_written_to_is_refused(monkeypatch, path, sentence):
  monkeypatch.setattr(remote, "_has_gcsfs", lambda: False)
  with pytest.raises(ValueError, match=f"^{path} ?.*{sentence}"):
    remote.as_path(path)
  with pytest.raises(SystemExit, match=f"^train: --folder={path}.*{sentence}"):
    programs.run(
      "train",
      f"--config={programs.SCRIPTS.parent}/configs/train/target.py",
      f"--folder={path}",
    )


def test_gcsfs_is_what_is_looked_for():
  assert remote._has_gcsfs() == (importlib.util.find_spec("gcsfs") is not None)


def test_copies_of_one_name_are_apart(bucket):
  paths = [remote.as_path(f"gs://bucket/{x}/lines.jsonl") for x in "ab"]
  one, other = map(remote.copy_of, paths)
  remote.forget(paths[0])
  assert len({one, other, remote.copy_of(paths[0])}) == 3


def test_a_store_that_takes_nothing_is_refused_at_the_door(bucket):
  def fail(name):
    raise RuntimeError("Anonymous caller\ndoes not have access")

  bucket.fail = fail
  for name, flag in (("roofline", "output"), ("roofline", "json")):
    sentence = (
      f"--{flag}=gs://bucket/x cannot be written: Anonymous caller does"
    )
    with pytest.raises(SystemExit, match=sentence):
      programs.run(name, f"--{flag}=gs://bucket/x")


@pytest.mark.parametrize(
  "name, flags",
  [
    ("generate", ["--target=gs://bucket/m"]),
    ("generate", ["--prompt_file=gs://bucket/p.jsonl", "--target=stdlib-1m"]),
    ("generate", ["--compilation_cache=gs://bucket/cache"]),
    ("bench", ["--calibrate=gs://bucket/c.json"]),
    ("convert", ["--source=gs://bucket/m", "--output=there"]),
    ("reproduce", ["--output=gs://bucket/results"]),
    ("prepare_data", ["--make=python", "--output=gs://bucket/corpus"]),
    ("choose_layers", ["--target=stdlib-1m", "--output=gs://bucket/layers"]),
    ("repeat_work", ["--target=stdlib-1m", "--output=gs://bucket/again"]),
    ("compare_training", ["gs://bucket/run"]),
    ("export", ["--drafter=lookup", "--k=2", "--output=gs://bucket/x"]),
  ],
)
def test_what_is_read_must_be_copied_first(bucket, name, flags):
  path = next(x.partition("gs:")[2] for x in flags if "gs:" in x)
  sentence = f"gs:{path} must be a local path; .*cp --recursive gs:{path} "
  with pytest.raises(SystemExit, match=f"^{name}: .*{sentence}"):
    programs.run(name, *flags)
  assert bucket.objects == {}


def test_what_is_read_must_be_copied_first_in_python_too(bucket):
  for read in (
    checkpoints.load,
    checkpoints.inspect,
    fetching.fetch,
    shipped.drafter,
    data.read,
  ):
    with pytest.raises(ValueError, match="gs://bucket/m must be a local path"):
      read("gs://bucket/m")


def test_the_cache_of_models_is_local(monkeypatch):
  monkeypatch.setenv("SPECDEC_CACHE", "gs://bucket/cache")
  with pytest.raises(
    ValueError, match=r"^the cache of models, gs://bucket/cach"
  ):
    fetching.cache_folder()


def test_texts_may_have_schemes_and_pages_go_to_the_store(bucket, capsys):
  programs.run(
    "generate",
    "--prompt=gs://x",
    "--target=stdlib-1m",
    "--max_new_tokens=2",
    "--html=gs://bucket/text.html",
    "--json=gs://bucket/text.json",
  )
  assert capsys.readouterr().out
  document = json.loads(bucket.objects["bucket/text.json"])
  assert document["prompts"]
  assert b"<html" in bucket.objects["bucket/text.html"]


def test_a_file_has_its_old_or_its_new_content(bucket, monkeypatch):
  files.replace_file("gs://bucket/a/b.txt", "old")
  assert bucket.objects == {"bucket/a/b.txt": b"old"}

  def stop(file):
    file.write(b"new")
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    files.replace_file("gs://bucket/a/b.txt", stop)
  assert bucket.objects == {"bucket/a/b.txt": b"old"}
  copy = shutil.copyfileobj

  def cut(source, target, size):
    copy(io.BytesIO(source.read()[:-1]), target)
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(shutil, "copyfileobj", cut)
    for content in ("new", "new" * 100_000):
      with pytest.raises(KeyboardInterrupt):
        files.replace_file("gs://bucket/a/b.txt", content)
  gc.collect()
  assert bucket.objects == {"bucket/a/b.txt": b"old"}
  bucket.fail = lambda name: 1 / 0
  with pytest.raises(
    files.NotWritten, match=r"^gs://bucket/a/b\.txt could not"
  ):
    files.replace_file("gs://bucket/a/b.txt", "new")
  bucket.fail = lambda name: None
  files.replace_file("gs://bucket/a/b.txt", "new")
  assert bucket.objects == {"bucket/a/b.txt": b"new"}


def write_folder(*found):
  def write(folder):
    (folder / "sub").mkdir(parents=True)
    for name in found:
      (folder / name).write_text(name)

  return write


def test_a_folder_is_without_its_config_until_it_is_whole(bucket):
  path = "gs://bucket/best"
  files.replace_folder(path, write_folder("config.json", "a", "sub/old"))
  assert bucket.writes[-1] == "bucket/best/config.json"
  bucket.writes.clear()
  files.replace_folder(path, write_folder("config.json", "z", "sub/new"))
  assert bucket.writes == [
    "-bucket/best/config.json",
    "-bucket/best/a",
    "-bucket/best/sub/old",
    "bucket/best/sub/new",
    "bucket/best/z",
    "bucket/best/config.json",
  ]

  def fail(name):
    if name.endswith("z"):
      raise RuntimeError("the connection was cut")

  bucket.fail = fail
  with pytest.raises(files.NotWritten, match=f"^{path} could not .*was cut"):
    files.replace_folder(path, write_folder("config.json", "z"))
  assert "config.json" not in names(bucket, "bucket/best")


def test_lines_are_uploaded_now_and_then_and_at_the_end(bucket, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
  path = remote.as_path("gs://bucket/run/lines.jsonl")
  bucket.objects["bucket/run/lines.jsonl"] = b'{"a": 0}\n{"b'
  lines = files.Lines(path)
  assert (lines.entries, len(lines.broken)) == ([{"a": 0}], 1)
  bucket.writes.clear()
  for number in range(1, 4):
    lines.append({"a": number})
  assert bucket.writes == []
  now[0] += remote.PERIOD
  lines.append({"a": 4})
  assert len(bucket.writes) == 1
  lines.append({"a": 5})
  assert [x["a"] for x in files.Lines(path).entries] == [0, 1, 2, 3, 4]
  run_folder.release()  # as every program does at its end
  assert [x["a"] for x in files.Lines(path).entries] == [0, 1, 2, 3, 4, 5]
  assert len(bucket.writes) == 2


def test_the_last_lock_is_named_and_ours_is_removed(bucket, capsys):
  folder = remote.as_path("gs://bucket/run")
  run_folder.claim(folder, {"a": 1})
  run_folder.claim(folder, {"a": 1})
  assert capsys.readouterr().err == ""
  holder = bucket.objects["bucket/run/.lock"].decode()
  assert f"process {os.getpid()} on " in holder
  run_folder.release()
  assert list(bucket.objects) == ["bucket/run/run.json"]
  bucket.objects["bucket/run/.lock"] = b"process 7 on vm"
  with pytest.raises(ValueError, match=r"gs://bucket/run holds .* \(a: 1 -> 2"):
    run_folder.claim(folder, {"a": 2})
  warning = "cannot be locked, and was last taken by process 7 on vm; make sure"
  assert warning in capsys.readouterr().err


def language_model():
  return objective.language_model(transformer.model(tiny_training.CONFIG))


def train(folder, kill_at=None):
  return tiny_training.train(
    folder, tiny_training.params(), language_model(), kill_at
  )[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run on a local disk that was not interrupted: its weights and log."""
  folder = tmp_path_factory.mktemp("whole")
  return train(folder), tiny_training.log(folder)


@pytest.mark.parametrize("kill_at", [2, 8])
def test_a_run_that_is_killed_resumes_bit_for_bit(bucket, whole, kill_at):
  folder = remote.as_path("gs://bucket/run")
  flush, remote.PERIOD = remote.PERIOD, 0.0
  with pytest.raises(tiny_training.Killed):
    train(folder, kill_at)
  remote.PERIOD = flush
  remote.close()  # the machine is gone, and what was not uploaded with it
  last = kill_at // 3 * 3  # steps between two checkpoints
  assert any(f"checkpoints/{last}/" in x for x in bucket.objects) or not last
  trained = train(folder)
  tiny_training.assert_equal(trained, whole[0])
  assert tiny_training.log(folder) == whole[1]
  found = names(bucket, "bucket/run")
  events = [x for x in found if x.startswith("tensorboard/events.")]
  assert events and all(bucket.objects[f"bucket/run/{x}"] for x in events)
  assert {x.split("/")[1] for x in found if "checkpoints/" in x} == {"9", "12"}


def test_a_damaged_checkpoint_gives_way(bucket, whole):
  folder = remote.as_path("gs://bucket/run")
  train(folder)
  for name in bucket.objects:
    if "checkpoints/12/" in name and "/d/" in name:
      bucket.objects[name] = bucket.objects[name][:-20]
  tiny_training.assert_equal(train(folder), whole[0])
  found = names(bucket, "bucket/run")
  assert any(x.startswith("unusable/12-0/default/") for x in found)


def test_lines_are_there_before_a_checkpoint_is(bucket):
  folder = remote.as_path("gs://bucket/run")
  log = Log(folder, 0)
  checkpoints_ = saving.Checkpoints(folder)
  log.write(1, "train", {"loss": 1.0})
  assert tiny_training.log(folder) == []
  state = saving.TrainState(
    *[np.zeros(1)] * len(saving.TrainState.__annotations__)
  )
  checkpoints_.save(state.replace(step=np.asarray(1)))
  assert [x["step"] for x in tiny_training.log(folder)] == [1]
  checkpoints_.close()
  log.close()


@pytest.mark.slow
def test_train_writes_what_it_writes_here(bucket, tmp_path):
  """A drafter with samples of its target, and a model, by the program."""
  tiny_training.write_letters(tmp_path / "target")
  (tmp_path / "text").write_text("the cat sat on the mat and it was hot " * 40)
  shared = dict(
    data=str(tmp_path / "text"), held_out=str(tmp_path / "text"),
    options=STEPS | dict(steps=4, eval_every=2, save_every=2),
  )  # fmt: skip
  model = dict(
    tokenizer=str(tmp_path / "target"),
    model=dict(vocab_size=27, num_layers=1, tied=True, **SHAPE),
  )
  head = dict(
    target=str(tmp_path / "target"),
    head_config=dict(kind="mtp", head="shared", levels=2, **SHAPE),
    loss=dict(divergence="forward_kl"),
    decoding=tiny_training.DECODING,
    samples=dict(count=16, prompt=4, temperature=1.0),
  )
  for name, entries in (("model", model), ("head", head)):
    config = tiny_training.write_config(
      tmp_path / f"{name}.py", **shared, **entries
    )
    local = tmp_path / name
    programs.run("train", config, f"--folder={local}")
    for _ in range(2):  # the second time there is nothing left to do
      programs.run("train", config, f"--folder=gs://bucket/{name}")
    for path in ("metrics.jsonl", *written(local)):
      there = bucket.objects[f"bucket/{name}/{path}"]
      assert there == (local / path).read_bytes(), path


def written(folder):
  """Files of a run that hold weights, and what belongs to them."""
  found = sorted(x for x in folder.rglob("*") if x.is_file())
  found = [x.relative_to(folder).as_posix() for x in found]
  kept = ("best", "last", "samples")
  return [x for x in found if x.startswith(kept)]


@pytest.mark.parametrize("layout", ["safetensors", "orbax"])
def test_convert_writes_what_it_writes_here(bucket, tmp_path, layout):
  programs.write_model(tmp_path / "model")
  flags = [f"--source={tmp_path / 'model'}", f"--layout={layout}"]
  programs.run("convert", *flags, "--output=gs://bucket/model")
  with pytest.raises(SystemExit, match="gs://bucket/model is not empty"):
    programs.run("convert", *flags, "--output=gs://bucket/model")
  copy = tmp_path / "copy"
  for name in names(bucket, "bucket/model"):
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_bytes(bucket.objects[f"bucket/model/{name}"])
  ours, theirs = (checkpoints.load(x) for x in (copy, tmp_path / "model"))
  tiny_training.assert_equal(ours.params, theirs.params)
  assert ours.tokenizer.tokens == theirs.tokenizer.tokens


def test_checkpoints_are_saved_from_python(bucket, tmp_path):
  programs.write_model(tmp_path / "model")
  model = checkpoints.load(tmp_path / "model")
  checkpoints.save_safetensors("gs://bucket/a", model.params, model.config)
  model.tokenizer.save("gs://bucket/a", None)
  weights = bucket.objects["bucket/a/model.safetensors"]
  assert weights == (tmp_path / "model" / "model.safetensors").read_bytes()
  assert "tokenizer.json" in names(bucket, "bucket/a")
  checkpoints.save_orbax("gs://bucket/b", model.params, model.config)
  assert any(x.startswith("orbax/") for x in names(bucket, "bucket/b"))
  programs.save_drafter(
    tmp_path / "model",
    "gs://bucket/c.safetensors",
    head_config("mtp", vocabulary=0),
  )
  local = tmp_path / "c.safetensors"
  local.write_bytes(bucket.objects["bucket/c.safetensors"])
  assert learned.load(local, model).head_config == head_config(
    "mtp", vocabulary=0
  )


def eval_flags(tmp_path):
  """Flags of a small evaluation in the store."""
  programs.write_model(tmp_path / "model")
  prompts = tmp_path / "prompts.jsonl"
  texts = ["hello there", "abcabcabc", "ein zwei drei"]
  prompts.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in texts))
  return [
    f"--target={tmp_path / 'model'}",
    f"--prompt_file={prompts}",
    "--max_new_tokens=8",
    "--drafter=lookup(min_ngram=1)",
    "--output=gs://bucket/eval",
    "--json=gs://bucket/other.json",
  ]


@pytest.mark.parametrize("name", ["lines.jsonl", "results.json"])
def test_a_store_that_stops_taking_ends_a_program_in_a_sentence(
  bucket, tmp_path, capsys, name
):
  def fail(path):
    if path.endswith(name):
      raise RuntimeError("quota exceeded")

  bucket.fail = fail
  sentence = f"^eval: gs://bucket/eval/{name} could not be written: quota exc"
  with pytest.raises(SystemExit, match=sentence):
    programs.run("eval", *eval_flags(tmp_path))
  assert "warning" not in capsys.readouterr().err
  assert "lines.jsonl" in "".join(bucket.objects) or name == "lines.jsonl"


def test_eval_resumes_there_and_repeats_nothing(bucket, tmp_path):
  flags = eval_flags(tmp_path)
  programs.run("eval", *flags)
  found = names(bucket, "bucket/eval")
  assert sorted(found) == [
    "lines.jsonl", "plot.png", "results.json", "run.json", "table.txt",
  ]  # fmt: skip
  first = json.loads(bucket.objects["bucket/other.json"])
  lines = bucket.objects["bucket/eval/lines.jsonl"]
  programs.run("eval", *flags)
  assert bucket.objects["bucket/eval/lines.jsonl"] == lines
  assert (
    json.loads(bucket.objects["bucket/other.json"])["runs"] == first["runs"]
  )
