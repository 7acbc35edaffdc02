"""What every result says about itself: command, date, versions, machine, load.

A number without them cannot be checked, nor compared with another.
"""

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys

import jax

from specdec.analysis import hardware

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "specdec")


def load() -> float | None:
  """Runnable processes, mean of the last minute; None where nobody says."""
  return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def header(settings: dict, caveats: list[str]) -> dict:
  """The part that all JSON documents have alike (docs/schema.json).

  Args:
    settings: the run's flags, those that stand for themselves in a command.
    caveats: what whoever reads the numbers must be told first.
  """
  device = jax.devices()[0]
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
    "format": "specdec/1",
    "command": shlex.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    "versions": {"python": platform.python_version(), **versions},
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
