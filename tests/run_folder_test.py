"""A run's folder: claimed by its settings, its lines never rewritten."""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

import programs
from specdec.utils import files


def test_claim_lists_what_differs(tmp_path):
  before = {"data": "a", "options": {"steps": 3, "log_every": 1}}
  files.claim(tmp_path / "run", before, ("log_every",))
  files.claim(tmp_path / "run", before, ("log_every",))
  now = {"data": "a", "options": {"steps": 4, "log_every": 2}}
  with pytest.raises(ValueError, match=r"\(options.steps: 3 -> 4\)"):
    files.claim(tmp_path / "run", now, ("log_every",))
  # How a run is watched may change.
  now["options"]["steps"] = 3
  files.claim(tmp_path / "run", now, ("log_every",))


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
import pathlib, sys
from specdec.utils import files
files.claim(pathlib.Path(sys.argv[1]), {"a": 1})
"""
HOLD = (
  CLAIM
  + """
import time
print("held", flush=True)
time.sleep(600)
"""
)


def claim_elsewhere(folder):
  """Claims a folder in another process."""
  command = [sys.executable, "-c", CLAIM, folder]
  return subprocess.run(command, stderr=subprocess.PIPE)


@pytest.fixture
def holder(tmp_path):
  """Another process that holds tmp_path."""
  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "held\n"
  yield process
  process.kill()
  process.communicate()
  files.release()


def test_a_folder_in_use_is_refused_by_its_holder_s_name(tmp_path, holder):
  for attempt in (
    lambda: files.lock(tmp_path),
    lambda: files.claim(tmp_path, {"a": 1}),
  ):
    with pytest.raises(OSError, match="is in use by process") as raised:
      attempt()
    assert f" {holder.pid} on {socket.gethostname()} " in str(raised.value)
    assert "\n" not in str(raised.value)
  # What several may share can be claimed all the same.
  files.claim(tmp_path, {"a": 1}, shared=True)


def test_a_killed_holder_leaves_no_lock(tmp_path, holder):
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  files.claim(tmp_path, {"a": 1})
  files.claim(tmp_path, {"a": 1})  # its own folder once more
  assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_folder_is_another_process_s_after_its_release(tmp_path):
  folder = tmp_path / "new" / "run"
  files.lock(folder)
  assert b"is in use by process" in claim_elsewhere(folder).stderr
  files.release()
  assert not folder.exists()  # nothing was written to it
  files.claim(folder, {"a": 1})
  assert b"is in use by process" in claim_elsewhere(folder).stderr
  files.release()
  assert sorted(os.listdir(folder)) == [".lock", "run.json"]
  assert not claim_elsewhere(folder).returncode


def test_a_lock_completes_what_a_kill_left_undone(tmp_path):
  for name in (".best.old", ".last.old", "last"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "weights").write_text(name)
  files.lock(tmp_path)
  files.release()
  assert sorted(os.listdir(tmp_path)) == [".lock", "best", "last"]
  assert (tmp_path / "best" / "weights").read_text() == ".best.old"
  assert (tmp_path / "last" / "weights").read_text() == "last"


@pytest.mark.parametrize("name", ["eval", "compare_drafters", "sweep"])
def test_a_file_in_place_of_the_folder_is_refused_at_the_door(tmp_path, name):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "a"}')
  given = [f"--prompt_file={prompts}", "--target=not/there"]
  if name == "sweep":
    given = [f"--sweep={programs.SCRIPTS.parent}/configs/sweeps/shipped.py"]
  for path, at in ((prompts, ""), (prompts / "run", f": {prompts}")):
    sentence = re.escape(f"{name}: --output={path}{at} is not a folder; ")
    with pytest.raises(SystemExit, match=f"^{sentence}"):
      programs.run(name, f"--output={path}", *given)


TARGET = "--target=not/there", "--temperature=1"
TRAIN = programs.SCRIPTS.parent / "configs" / "train"


@pytest.mark.parametrize(
  "name, arguments",
  [
    ("eval", [*TARGET, "--prompt_file={prompts}"]),
    ("write_answers", [*TARGET, "--prompt_file={prompts}"]),
    ("compare_rules", [*TARGET, "--prompt_file={prompts}"]),
    ("compare_drafters", [TARGET[0], "--prompt_file={prompts}"]),
    ("choose_layers", TARGET),
    ("invent_prompts", TARGET),
    ("train", [f"--config={TRAIN}/target.py"]),
    ("train_drafter", [f"--config={TRAIN}/drafter.py:prophet"]),
    ("train_joint", [f"--config={TRAIN}/joint.py:none"]),
  ],
)
def test_a_folder_in_use_is_refused_before_anything_is_loaded(
  tmp_path, holder, name, arguments
):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "a"}')
  arguments = [x.format(prompts=prompts) for x in arguments]
  folder = "folder" if name.startswith("train") else "output"
  with pytest.raises(SystemExit, match=f"^{name}: .* is in use by process"):
    programs.run(name, f"--{folder}={tmp_path}", *arguments)


def test_a_file_system_without_locks_is_warned_of(
  tmp_path, monkeypatch, capsys
):
  def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
  files.claim(tmp_path, {"a": 1})
  files.release()
  assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_one_of_several_hosts_locks(tmp_path, holder, monkeypatch):
  monkeypatch.setattr(files.multihost, "is_first", lambda: False)
  files.lock(tmp_path)  # the first has it, perhaps on another machine
