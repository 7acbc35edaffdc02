"""Compiles the steps of a round, also for absent chips, and reads them off.

All numbers are of one chip: memory, FLOPs, main-memory traffic, collectives.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from jax.experimental import topologies

import specdec
from specdec.compiled import hlo, products, traffic
from specdec.roofline import chips
from specdec.roofline.chips import Chip

_TRIED = (
  "v4:2x2x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:16x16", "v5p:2x2x1",
  "v6e:2x4", "v6e:4x4", "v6e:16x16", "tpu7x:2x2x1",
)  # fmt: skip
_CHIPS = {"tpu7x": "v7"}
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is asked
  "JAX_PLATFORMS": "cpu",  # no chip is opened
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def open_no_chip() -> None:
  """Sets JAX up to compile for absent chips, before anything wakes it."""
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
  jax.config.update("jax_enable_compilation_cache", False)  # it is timed


def devices(topology: str) -> list:
  """Returns the chips of a TPU slice that need not be attached.

  Raises:
    ValueError: libtpu is not installed, or has no such slice.
  """
  try:
    return topologies.get_topology_desc(
      topology_name=topology, platform="tpu"
    ).devices
  except Exception as error:  # what libtpu raises has no type of its own
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ValueError(
      f"topology {topology}: {reason}. It needs libtpu (pip install libtpu); "
      f"known to work: {', '.join(_TRIED)}"
    ) from error


def chip_of(topology: str) -> Chip:
  """Returns the datasheet of a slice's chips."""
  kind = topology.partition(":")[0]
  return chips.get(_CHIPS.get(kind, kind))


def compile_step(
  lower: Callable[[], jax.stages.Lowered],
  unknown: Mapping[str, float] = hlo.NO_COUNTS,
  shared_out: Collection[tuple[int, ...]] | None = None,
) -> tuple[dict, str]:
  """Returns what a compiled step needs and does, and its program.

  Args:
    unknown: how often loops run whose condition depends on data, as of
      hlo.Program.runs.
    shared_out: shapes of weights of which no chip should gather one whole; the
      report then says what is gathered so.
  """
  begin = time.perf_counter()
  compiled = lower().compile()
  seconds = time.perf_counter() - begin
  text = compiled.as_text()
  program, memory = hlo.Program(text), compiled.memory_analysis()
  touched = traffic.touches(program, unknown)
  exchanges = traffic.exchanges(program, unknown)
  report = {
    "seconds": seconds,
    "arguments": memory.argument_size_in_bytes,
    "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "flops": products.flops(program, unknown),
    "read": sum(t.times * t.read for t in touched),
    "written": sum(t.times * t.written for t in touched),
    "collectives": traffic.by_kind(exchanges),
    "exchanges": [one._asdict() for one in exchanges],
  }
  if shared_out is not None:
    whole = traffic.gathered(exchanges, shared_out)
    report["gathered"] = [one._asdict() for one in whole]
  return report, text


def compile_apart(module: str, argv: Sequence[str], patience: int) -> dict:
  """Compiles a step in a process of its own.

  Args:
    module: a program that takes --json=FILE, and writes {"steps": [report]}.
    argv: its other arguments.
    patience: seconds until it is given up; 0: never.

  Returns:
    The report, or {"error": why there is none}.
  """
  root = str(pathlib.Path(specdec.__file__).parents[1])
  paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "step.json"
    try:
      process = subprocess.run(
        [sys.executable, "-P", "-m", module, *argv, f"--json={path}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=patience or None,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return {"error": f"not in {patience} s"}
    if process.returncode:
      last = (process.stderr.strip().splitlines() or ["?"])[-1]
      return {"error": last[:300]}
    [report] = json.loads(path.read_text(encoding="utf-8"))["steps"]
    return report


def held(report: dict) -> float:
  """Returns bytes on each chip while a step runs."""
  return report["arguments"] + report["results"] + report["temporaries"]
