"""scripts/tpu_vm.sh, with a gcloud that runs commands of workers here."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "tpu_vm.sh"
# What is given to it is written down; a command for workers runs in home/.
GCLOUD = """#!/bin/bash
if [[ $1 == config ]]; then echo my-project; exit; fi
printf '%s\\n' "$*" >>{place}/calls
for argument in "$@"; do
  if [[ $argument == --command=* ]]; then
    cd {place}/home && exec bash -c "${{argument#*=}}"
  fi
done
"""
STUBS = {
  "lsblk": 'cat {place}/lsblk$(echo "$@" | tr -dc "A-Za-z0-9")',
  "sudo": 'echo "$@" >>{place}/sudo; [[ $1 != blkid ]]',
}


@pytest.fixture
def place(tmp_path):
  (tmp_path / "bin").mkdir()
  (tmp_path / "home" / "specdec").mkdir(parents=True)
  (tmp_path / "home" / "venv" / "bin").mkdir(parents=True)
  python = tmp_path / "home" / "venv" / "bin" / "python"
  python.symlink_to(sys.executable)
  stubs = {name: f"#!/bin/bash\n{text}\n" for name, text in STUBS.items()}
  for name, text in (stubs | {"gcloud": GCLOUD}).items():
    path = tmp_path / "bin" / name
    path.write_text(text.format(place=tmp_path))
    path.chmod(0o755)
  return tmp_path


def call(place, *arguments, status=0):
  """Runs the script; returns what it printed."""
  path = f"{place / 'bin'}:{os.environ['PATH']}"
  done = subprocess.run(
    [SCRIPT, *arguments],
    env=os.environ | {"PATH": path},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == status, done.stderr
  return done.stdout + done.stderr


def calls(place):
  """What gcloud was called with since the last look."""
  path = place / "calls"
  lines = path.read_text().splitlines()
  path.unlink()
  return lines


@pytest.mark.parametrize(
  "arguments, expected",
  [
    (
      "create me here v6e-8",
      "tpus tpu-vm create me --zone=here --accelerator-type=v6e-8 "
      "--version=v2-alpha-tpuv6e",
    ),
    (
      "create me here tpu7x-8 --spot",
      "tpus tpu-vm create me --zone=here --accelerator-type=tpu7x-8 "
      "--version=v2-alpha-tpu7-ubuntu2404 --spot",
    ),
    (
      "create me here v5litepod-16 --queued --spot --disk=models:ro",
      "tpus queued-resources create me --node-id=me --zone=here "
      "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite "
      "--spot --data-disk=source=projects/my-project/zones/here/disks/models,"
      "mode=read-only",
    ),
    (
      "create me here v4-8 --disk=models",
      "tpus tpu-vm create me --zone=here --accelerator-type=v4-8 "
      "--version=tpu-ubuntu2204-base --data-disk=source=projects/my-project/"
      "zones/here/disks/models,mode=read-write",
    ),
    (
      "disk models here v6e-8 500GB",
      "disks create models --zone=here --size=500GB --type=hyperdisk-balanced",
    ),
    (
      "disk models here v4-8 10GB",
      "disks create models --zone=here --size=10GB --type=pd-balanced",
    ),
    (
      "queue me here",
      "tpus queued-resources describe me --zone=here "
      "--format=value(state.state)",
    ),
    ("delete me here", "tpus tpu-vm delete me --zone=here --quiet"),
    (
      "delete me here --queued",
      "tpus queued-resources delete me --zone=here --force --quiet",
    ),
  ],
)
def test_what_gcloud_is_asked(place, arguments, expected):
  call(place, *arguments.split())
  assert calls(place) == [f"compute {expected}"]


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    ("create me here", "A TPU VM, or every worker"),
    ("create me here v6e-8 --cheap", "A TPU VM, or every worker"),
    ("explode me here", "A TPU VM, or every worker"),
    ("create me here v6e-8 --disk=", "A TPU VM, or every worker"),
    ("log me here 1;rm", "A TPU VM, or every worker"),
    ("stop me here now", "A TPU VM, or every worker"),
    ("delete me here --queued x", "A TPU VM, or every worker"),
    ("create me here v9-8", "no runtime known for v9-8; set TPU_VERSION"),
  ],
)
def test_what_it_does_not_know_is_refused(place, arguments, sentence):
  status = 1 if "runtime" in sentence else 2
  printed = call(place, *arguments.split(), status=status)
  assert sentence in printed
  assert not (place / "calls").exists()
  if status == 2:  # the help ends where the comment does
    assert printed.rstrip().endswith("only prints the commands.")


PROGRAM = """
import pathlib, sys, time
print("begun", *sys.argv[1:], flush=True)
while not pathlib.Path("end").exists():
  time.sleep(0.02)
sys.exit(3)
"""


def wait_for(condition):
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


def test_a_run_outlives_the_session_and_says_how_it_ended(place):
  home = place / "home" / "specdec"
  (home / "program.py").write_text(PROGRAM)
  assert "nothing was started" in call(place, "status", "me", "here")
  start = ("start", "me", "here", "program.py", "--x=a b", "$HOME", "it's")
  call(place, *start)
  wait_for(lambda: "begun" in (home / "run.log").read_text())
  assert call(place, "log", "me", "here", "1") == "begun --x=a b $HOME it's\n"
  assert ": running" in call(place, "status", "me", "here")
  assert "a run is going on" in call(place, *start, status=1)
  (home / "end").touch()
  wait_for((home / "run.status").exists)
  wait_for(lambda: (home / "run.status").read_text())
  assert "ended with status 3" in call(place, "status", "me", "here")
  (home / "end").unlink()
  call(place, *start)
  assert ": running" in call(place, "status", "me", "here")
  call(place, "stop", "me", "here")
  wait_for(lambda: ": killed" in call(place, "status", "me", "here"))
  workers = {
    x.rpartition("--worker=")[2][:3] for x in calls(place) if "ssh" in x
  }
  assert workers == {"all", "0 -"}


def test_run_waits_and_hands_on_the_status(place):
  (place / "home" / "specdec" / "program.py").write_text(PROGRAM)
  (place / "home" / "specdec" / "end").touch()
  printed = call(place, "run", "me", "here", "program.py", "a b", status=3)
  assert printed == "begun a b\n"


@pytest.mark.parametrize(
  "read_only, expected",
  [
    (
      0,
      "mkdir -p /data\nblkid /dev/sdb\nmkfs.ext4 -q -m 0 /dev/sdb\n"
      "mount /dev/sdb /data\nchmod a+rwx /data\n",
    ),
    (1, "mkdir -p /data\nmount -o ro,noload /dev/sdb /data\n"),
  ],
)
def test_the_blank_disk_is_mounted_and_the_used_ones_are_let_be(
  place, read_only, expected
):
  listed = "/dev/loop0 loop\n/dev/sda  disk\n/dev/sdb  disk\n/dev/sdc disk\n"
  (place / "lsblkdnpoNAMETYPE").write_text(listed)
  (place / "lsblknoMOUNTPOINTdevsda").write_text("\n/\n/boot\n")
  (place / "lsblknoMOUNTPOINTdevsdb").write_text("\n")
  (place / "lsblknoMOUNTPOINTdevsdc").write_text("/mnt\n")
  (place / "lsblkdnoROdevsdb").write_text(f" {read_only}\n")
  call(place, "mount", "me", "here")
  assert (place / "sudo").read_text() == expected
  (place / "lsblknoMOUNTPOINTdevsdb").write_text("/data\n")
  assert "no disk is left" in call(place, "mount", "me", "here", status=1)
