"""Over which devices a program runs: --mesh, --distributed."""

import math
import socket
import time

import _main
import jax
from absl import flags

from specdec import multihost, sharding
from specdec.models.config import TransformerConfig
from specdec.sharding import Places

_BEFORE = set(flags.FLAGS)
flags.DEFINE_string(
  "mesh",
  None,
  "data:N,model:M: N groups of M devices; each group has all weights, and "
  "shares out heads, inner columns and vocabulary among its M. Default: one "
  "device; to train, rows over all there are.",
)
flags.DEFINE_integer(
  "draft_ways",
  None,
  "Of the M, how many share the draft's weights; 1: each has all of them. "
  "Default: M.",
)
flags.DEFINE_bool(
  "distributed",
  False,
  "This process is one of several, each with devices of its own. On TPU slices "
  "and under SLURM it finds the others by itself.",
)
flags.DEFINE_string(
  "coordinator", None, "With --distributed: address:port of process 0."
)
flags.DEFINE_integer("processes", None, "With --coordinator: how many.")
flags.DEFINE_integer("process", None, "With --coordinator: which, from 0 on.")
flags.DEFINE_integer(
  "patience", 60, "With --distributed: seconds to wait for the others."
)
FLAGS = flags.FLAGS
OWN = sorted(set(FLAGS) - _BEFORE)
# What says how processes meet, and nothing about the work.
PROCESSES = sorted({*OWN} - {"mesh", "draft_ways"})


def join() -> None:
  """Meets the other processes, if there are any; all but process 0 fall
  silent. Before JAX is used.

  Raises:
    ValueError: half of an address was given.
    ConnectionError: they cannot be reached.
  """
  given = [FLAGS[n].value is not None for n in ("processes", "process")]
  if given != [FLAGS.coordinator is not None] * 2:
    raise ValueError("--coordinator, --processes and --process go together")
  if all(given) and not 0 <= FLAGS.process < FLAGS.processes:
    raise ValueError(
      f"--process={FLAGS.process}; it must be in 0..{FLAGS.processes - 1}"
    )
  if FLAGS.coordinator and not FLAGS.distributed:
    raise ValueError("--coordinator is for --distributed")
  if FLAGS.distributed and FLAGS.mesh is None:
    raise ValueError("--distributed needs --mesh: over what to work together")
  if not FLAGS.distributed or jax.distributed.is_initialized():
    return
  if FLAGS.process:
    _knock()  # JAX would end the process without a word for its user
  try:
    jax.distributed.initialize(
      FLAGS.coordinator,
      FLAGS.processes,
      FLAGS.process,
      initialization_timeout=FLAGS.patience,
    )
  except (RuntimeError, ValueError) as error:
    where = FLAGS.coordinator or "a coordinator (give --coordinator)"
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConnectionError(
      f"--distributed: {where} was not reached in {FLAGS.patience} s: {reason}"
    ) from error
  if not multihost.is_first():
    _main.hush()


def _knock() -> None:
  """Waits until the coordinator's port is open.

  Raises:
    ValueError: the address is none.
    ConnectionError: it stays closed.
  """
  host, _, port = FLAGS.coordinator.rpartition(":")
  if not (host and port.isdecimal()):
    raise ValueError(f"--coordinator={FLAGS.coordinator}; give address:port")
  end = time.monotonic() + FLAGS.patience
  while True:
    try:
      socket.create_connection((host, int(port)), timeout=1.0).close()
      return
    except OSError as error:
      if time.monotonic() > end:
        raise ConnectionError(
          f"--coordinator={FLAGS.coordinator} was not reached in "
          f"{FLAGS.patience} s: {error}"
        ) from error
      time.sleep(0.2)


def places(
  target: TransformerConfig,
  draft: TransformerConfig | None,
  devices=None,
  whole: bool = False,
) -> Places | None:
  """Where the two go; None without --mesh.

  Args:
    devices: default all that JAX has.
    whole: of the drafter every chip has all (a learned one, which is small).

  Raises:
    ValueError: there are fewer devices, or they do not divide the models.
  """
  if FLAGS.mesh is None:
    if FLAGS.draft_ways is not None:
      raise ValueError("--draft_ways is for --mesh")
    return None
  size = sharding.parse(FLAGS.mesh)
  if FLAGS.distributed and math.prod(size.values()) != jax.device_count():
    raise ValueError(
      f"--mesh={FLAGS.mesh} and the processes together have "
      f"{jax.device_count()} devices; --distributed takes all of them"
    )
  if not 1 <= (FLAGS.draft_ways or 1) <= size["model"]:
    raise ValueError(
      f"--draft_ways={FLAGS.draft_ways}; it must be in 1..{size['model']}, the "
      "mesh's model axis"
    )
  if whole:
    return sharding.places(FLAGS.mesh, target.counts, target.counts, 1, devices)
  draft = draft and draft.counts
  return sharding.places(
    FLAGS.mesh, target.counts, draft, FLAGS.draft_ways, devices
  )
