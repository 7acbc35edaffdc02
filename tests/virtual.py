"""Environments of test processes: XLA flags, CPUs that are several devices."""

import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence


def supported_flags(flags: Sequence[str]) -> list[str]:
  """Returns those of the XLA flags that the installed jaxlib knows.

  XLA aborts, without a Python error, a process whose XLA_FLAGS hold a flag that
  it does not know, and releases drop flags; so a process of its own is asked.

  Raises:
    RuntimeError: JAX does not start for another reason.
  """
  flags = list(flags)
  while flags:
    environment = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
      [sys.executable, "-c", "import jax; jax.devices()"],
      env=os.environ | environment,
      capture_output=True,
      text=True,
    )
    if process.returncode == 0:
      break
    rest = [flag for flag in flags if flag not in process.stderr]
    if rest == flags:
      raise RuntimeError(f"JAX does not start: {process.stderr[-2000:]}")
    flags = rest
  return flags


@functools.cache
def environment(devices: int) -> dict[str, str]:
  """Returns the environment of a process with so many virtual devices.

  Each waits in a collective for all others, and XLA aborts a process that waits
  long, as it did once on a loaded machine: hence more threads than devices, one
  program at a time, and ten minutes.
  """
  flags = [
    os.environ.get("XLA_FLAGS", ""),
    f"--xla_force_host_platform_device_count={devices}",
    *supported_flags(
      ["--xla_cpu_collective_call_terminate_timeout_seconds=600"]
    ),
  ]
  return os.environ | {
    "XLA_FLAGS": " ".join(flags),
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    "NPROC": str(4 * devices),  # threads of XLA's pools
  }


def run_cases(*options: str | pathlib.Path) -> None:
  """Runs pytest with these options on eight virtual devices; it must pass."""
  command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0"]
  done = subprocess.run(
    [*command, "--durations=5", *options],
    env=environment(8),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    cwd=pathlib.Path(__file__).parents[1],
  )
  print(done.stdout)
  assert done.returncode == 0, done.stdout[-4000:]
