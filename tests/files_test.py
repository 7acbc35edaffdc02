"""Files are written whole or not at all, also where the disk is full."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

import tiny_training
from specdec import checkpoints
from specdec.benchmark import results
from specdec.report import canvas
from specdec.training.log import Log
from specdec.utils import files

BYTES = 4096


@contextlib.contextmanager
def full_disk(size=BYTES):
  """No file may grow beyond `size`, as on a disk that is full."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def big_figure():
  made, [axes] = canvas.figure(3, "a title", (), 1)
  axes.plot(np.arange(100), np.random.default_rng(0).random(100))
  return made


WRITERS = {
  "text": lambda path: files.replace_file(path, "x" * 2 * BYTES),
  "json": lambda path: results.write_json(str(path), {"x": "y" * 2 * BYTES}),
  "picture": lambda path: canvas.save(big_figure(), path),
  "array": lambda path: files.replace_file(
    path, lambda file: np.save(file, np.zeros(BYTES))
  ),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("present", [True, False])
def test_a_full_disk_names_the_file_and_leaves_the_old_one(
  tmp_path, kind, present
):
  path = tmp_path / "results.png"
  if present:
    path.write_text("old")
  with full_disk(), pytest.raises(OSError, match="could not be") as raised:
    WRITERS[kind](path)
  assert str(raised.value).startswith(f"{path} could not be written: ")
  assert os.listdir(tmp_path) == (["results.png"] if present else [])
  if present:
    assert path.read_text() == "old"
  WRITERS[kind](path)
  assert path.stat().st_size > BYTES


def test_the_mode_is_the_umask_s_and_a_link_stays_one(tmp_path):
  (tmp_path / "link").symlink_to("file")
  files.replace_file(tmp_path / "link", b"one")
  assert (tmp_path / "link").is_symlink()
  assert (tmp_path / "file").read_bytes() == b"one"
  mask = os.umask(0)
  os.umask(mask)
  assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  files.replace_file(pipe, "text")
  assert os.read(reader, 10) == b"text"
  os.close(reader)
  assert pipe.is_fifo()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
  def write(folder, size=1):
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * size)

  target = tmp_path / "best"
  files.replace_folder(target, write)
  with full_disk(), pytest.raises(OSError, match=f"^{target} could not be"):
    files.replace_folder(target, lambda folder: write(folder, 2 * BYTES))
  assert os.listdir(tmp_path) == ["best"]
  assert (target / "weights").stat().st_size == 1
  files.replace_folder(target, lambda folder: write(folder, 2))
  assert os.listdir(tmp_path) == ["best"]
  assert (target / "weights").stat().st_size == 2


KILLED = """
import os, signal, sys
from specdec.utils import files
die = lambda file: os.kill(os.getpid(), signal.SIGKILL)
files.replace_file(sys.argv[1], die)
"""


def test_what_a_killed_process_half_wrote_is_removed(tmp_path):
  path = tmp_path / "results.json"
  command = [sys.executable, "-c", KILLED, path]
  assert subprocess.run(command).returncode == -signal.SIGKILL
  [left] = os.listdir(tmp_path)
  parts = left.split(".")
  alive = ".".join([*parts[:-2], str(os.getppid()), parts[-1]])
  elsewhere = left.replace(files._HOST, "another-host")
  for name in (alive, elsewhere):
    (tmp_path / name).touch()
  files.replace_file(path, "new")
  kept = [alive, elsewhere, "results.json"]
  assert sorted(os.listdir(tmp_path)) == sorted(kept)
  files.replace_file(tmp_path / ("é" * 120), "a long name")


CORPUS = """
import os, pathlib, signal, sys
from specdec.cli import prepare_data
left, write = int(sys.argv.pop()), pathlib.Path.write_bytes

def write_bytes(self, content):
  global left
  left -= 1
  left or os.kill(os.getpid(), signal.SIGKILL)
  return write(self, content)

pathlib.Path.write_bytes = write_bytes
sys.argv.append("--make=stdlib")
prepare_data.main.launch()
"""


def test_a_corpus_is_replaced_whole_and_by_one_process(tmp_path):
  corpus = tmp_path / "corpus"

  def write(kill=0):
    return subprocess.run(
      [sys.executable, "-c", CORPUS, f"--output={corpus}", str(kill)],
      capture_output=True,
      text=True,
    )

  def names():
    found = [x for x in corpus.rglob("*") if x.is_file() and x.name != ".lock"]
    return {str(x): x.read_bytes() for x in found}

  assert write(kill=10).returncode == -signal.SIGKILL
  done = write()
  assert done.returncode == 0, done.stderr
  before = names()
  assert len(before) > 100 and os.listdir(tmp_path) == ["corpus"]
  assert write(kill=10).returncode == -signal.SIGKILL
  assert names() == before
  files.lock(corpus)
  assert " is in use by process " in write().stderr
  files.release()
  assert write().returncode == 0
  assert names() == before and os.listdir(tmp_path) == ["corpus"]
  (corpus / "manifest.json").unlink()
  assert "is no corpus; not replaced" in write().stderr


class Killed(BaseException):
  pass


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("step", ["first rename", "second rename", "delete"])
def test_a_kill_while_folders_change_places_loses_neither(
  tmp_path, monkeypatch, step, link
):
  def writer(text):
    def write(folder):
      folder.mkdir()
      (folder / "weights").write_text(text)

    return write

  def kill(*_, **__):
    raise Killed

  def full(folder):
    folder.mkdir()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  target = tmp_path / "best"
  files.replace_folder(target, writer("old"))
  given, names = target, ["best"]
  if link:
    given, names = tmp_path / "link", ["best", "link"]
    given.symlink_to(target)
  rename, old = pathlib.Path.rename, tmp_path / ".best.old"
  with monkeypatch.context() as patch, pytest.raises(Killed):
    if step == "delete":
      patch.setattr(
        files.shutil,
        "rmtree",
        lambda path, **_: kill() if path == old and old.exists() else None,
      )
    else:
      killed = "best" if step == "first rename" else ".best"
      patch.setattr(
        pathlib.Path,
        "rename",
        lambda self, new: kill() if self.name == killed else rename(self, new),
      )
    files.replace_folder(given, writer("new"))
  with pytest.raises(OSError, match="No space left"):
    files.replace_folder(given, full)
  kept = "new" if step == "delete" else "old"
  assert (given / "weights").read_text() == kept
  assert sorted(os.listdir(tmp_path)) == names
  files.replace_folder(given, writer("newer"))
  assert (given / "weights").read_text() == "newer"
  assert sorted(os.listdir(tmp_path)) == names and given.is_symlink() == link


def test_a_line_that_does_not_fit_is_not_begun(tmp_path):
  path = tmp_path / "lines.jsonl"
  lines = files.Lines(path)
  lines.append({"a": 1})
  with full_disk(), pytest.raises(OSError, match=f"^{path} could not be"):
    lines.append({"a": "x" * 2 * BYTES})
  assert lines.entries == [{"a": 1}]
  assert path.read_text() == '{"a": 1}\n'
  lines.append({"a": 2})
  again = files.Lines(path)
  assert (again.entries, again.broken) == ([{"a": 1}, {"a": 2}], [])


def test_a_log_line_that_does_not_fit_is_not_begun(tmp_path):
  log = Log(tmp_path, 0)
  log.write(1, "train", {"loss": 1.0})
  path = tmp_path / "metrics.jsonl"
  with full_disk(), pytest.raises(OSError, match=f"^{path} could not be"):
    log.write(2, "train", {"loss": [0.5] * BYTES})
  assert [json.loads(x)["step"] for x in path.read_text().splitlines()] == [1]
  log.close()


def test_a_checkpoint_on_a_full_disk_names_its_file(tmp_path):
  config = tiny_training.CONFIG
  weights = tiny_training.params()
  with full_disk(1024), pytest.raises(OSError, match="safetensors could not"):
    checkpoints.save_safetensors(tmp_path, weights, config)


def test_a_tokenizer_on_a_full_disk_names_its_file(tmp_path):
  words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
  tokenizer = tokenizers.Tokenizer(words)
  with (
    full_disk(64),
    pytest.raises(OSError, match=r"tokenizer\.json could not"),
  ):
    checkpoints.Tokenizer(tokenizer).save(tmp_path)
  assert os.listdir(tmp_path) == []


def test_standard_output_is_written_to_and_not_replaced(tmp_path):
  write = "files.replace_file('/dev/stdout', '')"
  code = f"from specdec.utils import files; print('a'); {write}; print('b')"
  with (tmp_path / "out").open("w") as out:
    subprocess.run(
      [sys.executable, "-u", "-c", code],
      stdout=out,
      check=True,
    )
  assert "b" in (tmp_path / "out").read_text()
