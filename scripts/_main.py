"""What every program here does around its own work.

Errors that a user can mend end in one sentence, everything else in a traceback.
"""

import glob
import logging
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable

import jax
from absl import app, flags
from absl import logging as absl_logging

from specdec import multihost
from specdec.utils import files, terminal

_MENDABLE = (ValueError, OSError, MemoryError)


def main_of(
  name: str,
  work: Callable[..., None],
  interrupted: str = "stopped",
  takes_arguments: bool = False,
  also: tuple[type[Exception], ...] = (),
) -> Callable[[list[str]], None]:
  """`main` for absl.

  Args:
    work: the program, called without arguments, or with the list of those that
      are no flags.
    interrupted: what is said after Ctrl-C.
    also: more errors that a user can mend.
  """

  def main(argv: list[str]) -> None:
    if len(argv) > 1 and not takes_arguments:
      _end(f"{name}: unexpected argument {argv[1]!r}; flags begin with --")
    try:
      check_integers()
      work(argv[1:]) if takes_arguments else work()
    except (*_MENDABLE, *also) as error:
      _unhush()
      _end(f"{name}: {str(error) or _no_memory(error)}")
    except KeyboardInterrupt:
      _end(f"{name}: {interrupted}")
    except Exception as error:
      _unhush()
      if "RESOURCE_EXHAUSTED" in str(error):  # of XLA's allocator
        _end(f"{name}: {_no_memory(error)}")
      if jax.distributed.is_initialized():
        _end(traceback.format_exc())
      raise
    finally:
      files.release()

  return main


def _no_memory(error: Exception) -> str:
  """What to do where an allocator gave up."""
  if not isinstance(error, MemoryError | RuntimeError):
    return type(error).__name__
  what = (str(error).splitlines() or ["no more could be allocated"])[0]
  smaller = "take a smaller --batch, --max_new_tokens, prompt or model"
  if jax.default_backend() != "cpu":  # which multiplies in float32
    smaller += ", or --dtype=bfloat16"
  return f"out of memory ({what}); {smaller}"


def check_integers() -> None:
  """Raises ValueError where an integer flag holds more than arrays can."""
  for name in flags.FLAGS:
    value = flags.FLAGS[name].value
    if type(value) is int and abs(value) >= 2**31 and name != "seed":
      raise ValueError(f"--{name}={value}; it must be between -2**31 and 2**31")


def _end(text: str) -> None:
  """Ends with an error.

  One of several processes goes at once: an orderly end would wait for the
  others, who wait for it; JAX then ends them, as it misses one.
  """
  text = terminal.escape(text)
  if not jax.distributed.is_initialized():
    sys.exit(text)
  print(text, file=sys.stderr, flush=True)
  os._exit(1)


def start(main: Callable[[list[str]], None]) -> None:
  """Runs a program, without the chatter of libraries."""
  # Which backends are absent is no news to whoever runs this.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  _quiet_libtpu()
  absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax tells a lot
  jax.config.update("jax_enable_x64", False)  # whatever the environment says
  # What fails in its threads it raises in ours as well.
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  absl_logging.get_absl_logger().addFilter(
    lambda record: not (record.exc_info and "orbax" in record.pathname)
  )
  warnings.filterwarnings("ignore", "coroutine .* was never awaited")
  sys.excepthook, sys.unraisablehook = _excepthook, _unraisablehook
  app.run(main, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the flags; an error ends the program in one sentence."""
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    _end(f"{pathlib.Path(argv[0]).stem}: {error}")


def _quiet_libtpu() -> None:
  """Names a TPU's kind and hosts where there is none, before JAX looks for one.

  Where libtpu is installed it is opened all the same, and misses both in five
  lines.
  """
  chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
  # JAX sets it where it sees no chip.
  if os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and not chips:
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _excepthook(*error) -> None:
  """Prints a traceback, its sentence escaped as every other."""
  lines = traceback.format_exception(*error)
  print(terminal.escape("".join(lines)), end="", file=sys.stderr)


def _unraisablehook(unraisable) -> None:
  """Prints an error that nobody catches, but for TensorStore's that comes when
  Orbax has failed already."""
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def hush() -> None:
  """Prints nothing from now on, but for the error that ends the program."""
  sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _unhush() -> None:
  if getattr(sys.stderr, "name", None) == os.devnull:
    sys.stderr = sys.__stderr__


def take_folder(name: str, path: str) -> None:
  """Locks the folder `path`, given as `name`.

  Raises:
    BlockingIOError: another process has it.
    ValueError: it could not be written by the process that writes.
  """
  check_folder(name, path)
  files.lock(pathlib.Path(path))


def check_folder(name: str, path: str) -> None:
  """Raises ValueError where the folder `path`, given as `name`, could not be
  written, or created, by the process that writes."""
  if not multihost.is_first():
    return
  folder = pathlib.Path(path).absolute()
  present = next(x for x in (folder, *folder.parents) if os.path.lexists(x))
  if not present.is_dir():
    whole = "" if present == folder else f": {present}"
    raise ValueError(f"{name}={path}{whole} is not a folder; name a folder")
  if not os.access(present, os.W_OK | os.X_OK):
    raise ValueError(f"{name}={path} cannot be written; choose another place")


def check_writable(name: str, path: str) -> None:
  """Raises ValueError where `path`, given as `name`, could not be written by
  the process that writes."""
  if not multihost.is_first():
    return
  file = pathlib.Path(path)
  if file.is_dir():
    raise ValueError(f"{name}={path} is a folder; give a file in it")
  if not file.parent.is_dir():
    raise ValueError(
      f"{name}={path}: there is no folder {file.parent}; make it first"
    )
  places = [file] if file.exists() else []
  if not files.is_stream(file):  # a new file takes its place
    places.append(file.parent)
  if not all(os.access(place, os.W_OK) for place in places):
    raise ValueError(f"{name}={path} cannot be written; choose another place")
