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
  assert [line.split(" of ")[0] for line in lines.broken] == [
    "line 2",
    "line 4",
  ]


HOLD = """
import pathlib, sys, time
from specdec.utils import files
files.claim(pathlib.Path(sys.argv[1]), {"a": 1})
print("held", flush=True)
time.sleep(600)
"""


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


def test_of_two_first_starts_the_second_is_refused(tmp_path):
  folder = tmp_path / "new" / "run"
  files.lock(folder)
  command = [sys.executable, "-c", HOLD.replace("time.sleep(600)", "")]
  found = subprocess.run([*command, folder], stderr=subprocess.PIPE)
  assert b"is in use by process" in found.stderr
  files.release()
  assert not folder.exists()  # nothing was written to it
  files.claim(folder, {"a": 1})
  files.release()
  assert sorted(os.listdir(folder)) == [".lock", "run.json"]


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
    said = re.escape(f"{name}: --output={path}{at} is not a folder; ")
    with pytest.raises(SystemExit, match=f"^{said}"):
      programs.run(name, f"--output={path}", *given)


def test_a_released_folder_can_be_taken_by_others(tmp_path):
  files.claim(tmp_path, {"a": 1})
  command = [sys.executable, "-c", HOLD.replace("time.sleep(600)", "")]
  found = subprocess.run([*command, tmp_path], stderr=subprocess.PIPE)
  assert found.returncode and b"is in use by process" in found.stderr
  files.release()
  subprocess.run([*command, tmp_path], check=True)


PROMPTS = "--prompt_file={prompts}"
PROGRAMS = [
  ("eval", [PROMPTS]),
  ("write_text", [PROMPTS]),
  ("write_text", ["--write=prompts", "--temperature=1"]),
  ("compare_rules", [PROMPTS, "--temperature=1"]),
  ("compare_drafters", [PROMPTS]),
  ("choose_layers", []),
]


@pytest.mark.parametrize("name, arguments", PROGRAMS)
def test_programs_refuse_a_folder_in_use_before_they_load(
  tmp_path, holder, name, arguments
):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "a"}')
  arguments = [x.format(prompts=prompts) for x in arguments]
  with pytest.raises(SystemExit, match=f"^{name}: .* is in use by process"):
    programs.run(name, f"--output={tmp_path}", "--target=not/there", *arguments)


@pytest.mark.parametrize("config", ["target.py", "drafter.py:prophet"])
def test_training_refuses_a_folder_in_use(tmp_path, holder, config):
  root = programs.SCRIPTS.parent
  command = [sys.executable, root / "scripts" / "train.py"]
  command += [f"--config={root}/configs/train/{config}", f"--folder={tmp_path}"]
  found = subprocess.run(command, capture_output=True, text=True)
  assert found.returncode == 1
  assert re.match("train: .* is in use by process .*\n$", found.stderr)


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
