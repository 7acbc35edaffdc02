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

import flax
import jax
import jaxlib
import numpy as np

import specdec
from specdec.models import cpu_kernels
from specdec.roofline import hardware


def load() -> float | None:
  """Runnable processes, mean of the last minute; None where nobody says."""
  return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def now() -> str:
  """Local time with its offset from UTC, ISO 8601."""
  return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def commit() -> str | None:
  """The sources' commit, marked where files were changed; None outside git."""
  try:
    result = subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=12"],
      cwd=pathlib.Path(__file__).parent,
      capture_output=True,
      text=True,
      check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return None
  return result.stdout.strip()


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
