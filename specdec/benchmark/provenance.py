"""What every result says about itself: command, date, versions, machine, load.

A number without them cannot be checked, nor compared with another.
"""

import datetime
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time

import flax
import jax
import jaxlib
import numpy as np

import specdec
from specdec.models import cpu_kernels
from specdec.roofline import hardware

QUIET = 0.3  # cores that others may keep busy


def load() -> float | None:
  """Runnable processes, mean of the last minute; None where nobody says."""
  return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy_cores(seconds: float = 2.0) -> float | None:
  """How many cores are busy just now; None where nobody says.

  Unlike the load, it knows nothing of what has ended a moment ago.
  """
  try:
    before, idle_before = _core_ticks()
    time.sleep(seconds)
    after, idle_after = _core_ticks()
  except OSError:
    return None
  share = 1 - (idle_after - idle_before) / max(after - before, 1)
  return round(share * (os.cpu_count() or 1), 2)


def _core_ticks() -> tuple[int, int]:
  """Returns (all, idle) of all cores since Linux began."""
  first = pathlib.Path("/proc/stat").read_text().partition("\n")[0]
  ticks = [int(x) for x in first.split()[1:9]]
  return sum(ticks), ticks[3] + ticks[4]


def now() -> str:
  """Local time with its offset from UTC, ISO 8601."""
  return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def commit() -> str | None:
  """The sources' commit, marked where files were changed; None outside git.

  Pages and results are no sources: they change as a reproduction goes on.
  """
  pages = [f":(top,exclude){name}" for name in ("docs", "results", "*.md")]
  try:
    revision = _git("rev-parse", "--short=12", "HEAD")
    options = "--porcelain", "--untracked-files=no"
    changed = _git("status", *options, "--", ":/", *pages)
  except (OSError, subprocess.CalledProcessError):
    return None
  return revision + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
  """Returns what git says of the repository with the sources."""
  result = subprocess.run(
    ["git", *arguments],
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    text=True,
    check=True,
  )
  return result.stdout.strip()


def is_dirty(commit: str | None) -> bool:
  """Whether two runs of what `commit` returned may be of different sources."""
  return commit is None or commit.endswith("-dirty")


def header(settings: dict, caveats: list[str]) -> dict:
  """The part that all JSON documents have alike (docs/schema.json).

  Args:
    settings: the run's flags, those that stand for themselves in a command.
    caveats: what whoever reads the numbers must be told first.
  """
  device = jax.devices()[0]
  packages = {x.__name__: x.__version__ for x in (jax, jaxlib, flax, np)}
  kernels = device.platform == "cpu" and cpu_kernels.available()
  return {
    "format": "specdec/1",
    "command": shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    "date": now(),
    "versions": {
      "python": platform.python_version(),
      **packages,
      "specdec": specdec.__version__,
      "kernels": "C++" if kernels else None,
      "commit": commit(),
    },
    "machine": {
      "backend": jax.default_backend(),
      "device": hardware.cpu_model()
      if device.platform == "cpu"
      else device.device_kind,
      "devices": jax.device_count(),
      "cpu_cores": hardware.cpu_cores(),
      "load": load(),
    },
    "settings": settings,
    "caveats": caveats,
  }
