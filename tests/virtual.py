"""Processes whose CPU is several devices."""

import os


def environment(devices: int) -> dict[str, str]:
  """The environment of a process with so many virtual devices.

  Each waits in a collective for all others, and XLA aborts a process that waits
  long, as it did once on a loaded machine: hence more threads than devices, one
  program at a time, and ten minutes.
  """
  flags = (
    f"{os.environ.get('XLA_FLAGS', '')} "
    f"--xla_force_host_platform_device_count={devices} "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
  )
  return os.environ | {
    "XLA_FLAGS": flags,
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    "NPROC": str(4 * devices),  # threads of XLA's pools
  }
