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
import sysconfig

import numpy as np
import pytest
from flax import traverse_util

import programs
from gguf_files import CONFIG, random_params
from specdec import checkpoints
from specdec.benchmark import results
from specdec.report import canvas
from specdec.training import corpus
from specdec.training.log import Log
from specdec.utils import files, run_folder

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
  figure, [axes] = canvas.figure(3, "a title", (), 1)
  axes.plot(np.arange(100), np.random.default_rng(0).random(100))
  return figure


WRITERS = {
  "text": lambda path: files.replace_file(path, "x" * 2 * BYTES),
  "json": lambda path: results.write_json(str(path), {"x": "y" * 2 * BYTES}),
  "picture": lambda path: canvas.save(big_figure(), path),
  "array": lambda path: files.replace_file(
    path, lambda file: np.save(file, np.zeros(BYTES))
  ),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path, kind):
  path = tmp_path / "results.png"
  for present in ([], ["results.png"]):
    for name in present:
      (tmp_path / name).write_text("old")
    with full_disk(), pytest.raises(OSError, match="could not be") as raised:
      WRITERS[kind](path)
    assert str(raised.value).startswith(f"{path} could not be written: ")
    assert os.listdir(tmp_path) == present
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


def test_pipes_and_standard_output_are_written_to_and_not_replaced(tmp_path):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
  files.replace_file(pipe, "text")
  assert os.read(reader, 10) == b"text"
  os.close(reader)
  assert pipe.is_fifo()
  assert files.is_stream("/dev/stdout") and files.is_stream("/dev/fd/5")
  assert not files.is_stream(tmp_path / "absent")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
  def write(folder, size=1):
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * size)

  target = tmp_path / "best"
  files.replace_folder(target, write)
  with full_disk(), pytest.raises(OSError, match=f"^{target} could not be"):
    files.replace_folder(target, lambda folder: write(folder, 2 * BYTES))
  with full_disk(), pytest.raises(OSError, match=f"^{target}/x could not be"):
    files.replace_folder(
      target, lambda folder: files.replace_file(folder / "x", "x" * 2 * BYTES)
    )
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
from specdec.training import corpus
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.write_text = kill  # the last two files
corpus.write(pathlib.Path(sys.argv[1]))
"""


def test_a_corpus_is_replaced_whole_and_by_one_process(tmp_path, monkeypatch):
  library, folder = tmp_path / "library", tmp_path / "corpus"
  library.mkdir()
  (library / "ast.py").write_text("name = 'ast'\n")
  monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": library})
  corpus.write(folder)
  run_folder.release()

  def contents():
    names = [x for x in folder.rglob("*") if x.is_file() and x.name != ".lock"]
    return {x.name: x.read_text() for x in names}

  before = contents()
  assert before.keys() == {"ast.py", "manifest.json", "prompts.jsonl"}
  command = [sys.executable, "-c", CORPUS, folder]
  assert subprocess.run(command).returncode == -signal.SIGKILL
  assert contents() == before
  (library / "ast.py").write_text("name = 'new'\n")
  corpus.write(folder)
  assert contents()["ast.py"] == "name = 'new'\n"
  assert sorted(os.listdir(tmp_path)) == ["corpus", "library"]
  run_folder.release()
  run_folder.lock(folder)
  with monkeypatch.context() as patch:
    patch.setattr(run_folder, "_locks", {})  # as in another process
    with pytest.raises(BlockingIOError, match=" is in use by process "):
      corpus.write(folder)
  run_folder.release()
  (folder / "manifest.json").unlink()
  with pytest.raises(ValueError, match="is no corpus; not replaced"):
    corpus.write(folder)


def test_the_corpus_of_this_interpreter(tmp_path):
  programs.run(
    "prepare_data", "--make=python", f"--output={tmp_path / 'corpus'}"
  )
  manifest = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
  for part in ("train", "held_out"):
    names = [x for x in (tmp_path / "corpus" / part).rglob("*") if x.is_file()]
    assert len(names) == len(manifest[part]) > 10
  assert (tmp_path / "corpus" / "prompts.jsonl").read_text().count("\n") > 10


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
      killed = "best" if step == "first rename" else ".part"
      patch.setattr(
        pathlib.Path,
        "rename",
        lambda self, new: (
          kill() if self.name.endswith(killed) else rename(self, new)
        ),
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


def test_two_writers_of_a_folder_leave_one_whole(tmp_path):
  target = tmp_path / "best"
  code = (
    "import sys; from specdec.utils import files\n"
    "def write(folder):\n"
    "  folder.mkdir()\n"
    "  (folder / 'a').write_text('other')\n"
    "  print('begun', flush=True); sys.stdin.readline()\n"
    "  (folder / 'b').write_text('other')\n"
    "files.replace_folder(sys.argv[1], write)\n"
  )
  with subprocess.Popen(
    [sys.executable, "-c", code, target],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as other:
    assert other.stdout.readline() == "begun\n"

    def write(folder):
      folder.mkdir()
      for name in "ab":
        (folder / name).write_text("ours")

    files.replace_folder(target, write)
    assert [x.read_text() for x in target.iterdir()] == ["ours"] * 2
    other.communicate("\n")
    assert other.returncode == 0
  assert [x.read_text() for x in target.iterdir()] == ["other"] * 2
  assert os.listdir(tmp_path) == ["best"]


def test_a_line_that_does_not_fit_is_not_begun(tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines, log = files.Lines(path), Log(tmp_path, 0)
  lines.append({"step": 1})
  with full_disk():
    with pytest.raises(OSError, match=f"^{path} could not be"):
      lines.append({"step": "x" * 2 * BYTES})
    with pytest.raises(OSError, match=f"^{path} could not be"):
      log.write(2, "train", {"loss": [0.5] * BYTES})
  log.close()
  assert lines.entries == [{"step": 1}]
  assert path.read_text() == '{"step": 1}\n'
  lines.append({"step": 2})
  again = files.Lines(path)
  assert (again.entries, again.broken) == ([{"step": 1}, {"step": 2}], [])


def test_damaged_lines_are_named_and_the_others_are_read(tmp_path):
  path = tmp_path / "answers.jsonl"
  path.write_bytes(
    b'{"prompt": 0}\n{"prompt": "\xff"}\n{"a": 1}\n{"prompt": [1]}\n'
    b'{"prompt": 1}\n{"prompt":'
  )
  lines = files.Lines(path, {"prompt": int})
  assert lines.entries == [{"prompt": 0}, {"prompt": 1}]
  assert lines.broken == [
    f"line {i} of {path} is not a JSON object with prompt" for i in (2, 3, 4, 6)
  ]
  lines.append({"prompt": 2})
  assert files.Lines(path, {"prompt": int}).entries == lines.entries


def test_a_checkpoint_on_a_full_disk_names_its_file(tmp_path):
  params = traverse_util.unflatten_dict(random_params(), sep="/")
  with full_disk(1024), pytest.raises(OSError, match="safetensors could not"):
    checkpoints.save_safetensors(tmp_path, params, CONFIG)
