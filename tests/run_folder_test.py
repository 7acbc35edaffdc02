"""A run's folder: claimed by its settings, its lines never rewritten."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

import programs
from specdec.utils import files, run_folder


def test_claim_lists_what_differs(tmp_path):
  before = {"data": "a", "options": {"steps": 3, "log_every": 1}}
  run_folder.claim(tmp_path / "run", before, ("log_every",))
  run_folder.claim(tmp_path / "run", before, ("log_every",))
  now = {"data": "a", "options": {"steps": 4, "log_every": 2}}
  with pytest.raises(ValueError, match=r"\(options.steps: 3 -> 4\)"):
    run_folder.claim(tmp_path / "run", now, ("log_every",))
  # How a run is watched may change.
  now["options"]["steps"] = 3
  run_folder.claim(tmp_path / "run", now, ("log_every",))


@pytest.mark.parametrize("content", ["", "[1]", "null", '{"data"', "\udcff"])
def test_settings_that_cannot_be_read_are_named(content, tmp_path):
  (tmp_path / "run.json").write_text(content, errors="surrogateescape")
  with pytest.raises(ValueError, match=r"run\.json holds no run's"):
    run_folder.check(tmp_path, {"data": "a"})


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path):
  path = tmp_path / "lines.jsonl"
  lines = files.Lines(path)
  lines.append({"a": 1})
  lines.append({"a": 2})
  whole = path.read_text()
  for cut in range(len(whole) + 1):
    path.write_text(whole[:cut])
    lines = files.Lines(path)
    complete = [{"a": 1}, {"a": 2}][: len(lines.entries)]
    assert lines.entries == complete
    assert len(lines.broken) == (cut not in (0, 8, 9, 17, 18))
    lines.append({"a": 3})
    again = files.Lines(path)
    assert again.entries == [*complete, {"a": 3}]
    assert path.read_text().startswith(whole[:cut])  # nothing was rewritten


def test_lines_that_are_no_object_are_named(tmp_path):
  path = tmp_path / "lines.jsonl"
  path.write_text('{"a": 1}\n[2]\n\n{"a":\n{"a": 4}\n')
  lines = files.Lines(path)
  assert lines.entries == [{"a": 1}, {"a": 4}]
  names = [line.split(" of ")[0] for line in lines.broken]
  assert names == ["line 2", "line 4"]


CLAIM = """
import pathlib, sys, time
from specdec.utils import run_folder
for folder in sys.argv[1:]:
  run_folder.claim(pathlib.Path(folder), {"a": 1})
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def hold(*folders):
  """Claims folders in another process; yields it, and what it printed."""
  process = subprocess.Popen(
    [sys.executable, "-c", CLAIM, *map(str, folders)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    yield process, process.stdout.readline()
  finally:
    process.kill()
    process.communicate()
    run_folder.release()


@pytest.fixture(scope="module")
def held(tmp_path_factory):
  """A folder that another process holds, and that process."""
  folder = tmp_path_factory.mktemp("held")
  with hold(folder) as (process, printed):
    assert printed == "held\n"
    yield folder, process


def test_a_folder_in_use_is_refused_by_its_holder_s_name(held, monkeypatch):
  folder, process = held
  for attempt in (
    run_folder.lock,
    lambda folder: run_folder.claim(folder, {"a": 1}),
  ):
    with pytest.raises(OSError, match="is in use by process") as raised:
      attempt(folder)
    assert f" {process.pid} on {socket.gethostname()} " in str(raised.value)
    assert "\n" not in str(raised.value)
  # What several may share can be claimed all the same.
  run_folder.claim(folder, {"a": 1}, shared=True)
  # One of several hosts locks: the first has it, perhaps on another machine.
  monkeypatch.setattr(files.multihost, "is_first", lambda: False)
  run_folder.lock(folder)


def test_a_killed_holder_leaves_no_lock_and_a_release_none(tmp_path):
  with hold(tmp_path) as (process, printed):
    assert printed == "held\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_folder.claim(tmp_path, {"a": 1})
    run_folder.claim(tmp_path, {"a": 1})  # its own folder once more
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    with hold(tmp_path) as (other, printed):
      assert not printed and "in use by process" in other.stderr.read()
  # Each context ends with a release.
  with hold(tmp_path) as (_, printed):
    assert printed == "held\n"


def test_a_folder_that_nothing_was_written_to_goes_with_its_lock(tmp_path):
  folder = tmp_path / "new" / "run"
  run_folder.lock(folder)
  run_folder.release()
  assert not folder.exists()
  run_folder.claim(folder, {"a": 1})
  run_folder.release()
  assert sorted(os.listdir(folder)) == [".lock", "run.json"]


def test_a_lock_completes_what_a_kill_left_undone(tmp_path):
  for name in (".best.old", ".last.old", "last"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "weights").write_text(name)
  run_folder.lock(tmp_path)
  run_folder.release()
  assert sorted(os.listdir(tmp_path)) == [".lock", "best", "last"]
  assert (tmp_path / "best" / "weights").read_text() == ".best.old"
  assert (tmp_path / "last" / "weights").read_text() == "last"


TARGET = "--target=not/there", "--temperature=1"
TRAIN = programs.SCRIPTS.parent / "configs" / "train"


@pytest.mark.parametrize(
  "name, arguments",
  [
    ("eval", [*TARGET, "--prompt_file={prompts}"]),
    ("write_text", [*TARGET, "--prompt_file={prompts}"]),
    ("compare_rules", [*TARGET, "--prompt_file={prompts}"]),
    ("compare_drafters", [TARGET[0], "--prompt_file={prompts}"]),
    ("choose_layers", TARGET),
    ("write_text", ["--write=prompts", *TARGET]),
    ("train", [f"--config={TRAIN}/target.py"]),
    ("train", [f"--config={TRAIN}/drafter.py:prophet"]),
    ("train", [f"--config={TRAIN}/joint.py:none"]),
  ],
)
def test_a_folder_in_use_is_refused_before_anything_is_loaded(
  tmp_path, held, name, arguments
):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "a"}')
  arguments = [x.format(prompts=prompts) for x in arguments]
  folder = "folder" if name.startswith("train") else "output"
  with pytest.raises(SystemExit, match=f"^{name}: .* is in use by process"):
    programs.run(name, f"--{folder}={held[0]}", *arguments)


def test_a_file_system_without_locks_is_warned_of(
  tmp_path, monkeypatch, capsys
):
  def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
  run_folder.claim(tmp_path, {"a": 1})
  run_folder.release()
  assert "cannot be locked (No locks available)" in capsys.readouterr().err
