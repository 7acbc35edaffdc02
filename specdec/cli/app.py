"""What every program does around its own work: flags, help, errors.

A program has flags of its own (`absl.flags.FlagValues`), not the global ones,
so that its --help lists all of them and no other. They are read once, into
`Options`. An error that a user can mend ends in one sentence, any other in a
traceback.
"""

import dataclasses
import glob
import logging
import os
import pathlib
import shlex
import signal
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np
from absl import app, flags
from absl import logging as absl_logging

from specdec import multihost
from specdec.cli.flags import Flags
from specdec.utils import files, remote, run_folder, spelling, terminal
from specdec.utils.calls import user_line

_MENDABLE = (ValueError, OSError, MemoryError)
# Flags of what is written, also to an object store, and flags of texts; what
# others name is read, or written, here.
_REMOTE = ("output", "folder", "json", "html", "picture")
_TEXTS = ("prompt", "stop", "title", "target_as", "edit", "coordinator")
_HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")
CONTINUES = "stopped; the same command goes on from here"


class Options(types.SimpleNamespace):
  """Values of a program's flags, each an attribute.

  `given` holds the names of those that were on the command line; `arguments`
  what is no flag; `argv` the command line without the program's name.
  """


@dataclasses.dataclass(frozen=True)
class Program:
  """A program: called with an argv it runs; `launch` is for a shell.

  Attributes:
    doc: the module's docstring, which --help begins with.
    define: defines the flags.
    work: the program.
    interrupted: printed after Ctrl-C.
    takes_arguments: it takes arguments that are no flags.
  """

  doc: str
  define: Callable[[Flags], None]
  work: Callable[[Options], None]
  interrupted: str = "stopped"
  takes_arguments: bool = False

  def flag_values(self, argv: Sequence[str]) -> flags.FlagValues:
    """Returns the flags, which a call with argv parses."""
    defined = Flags(argv)
    self.define(defined)
    return defined.values

  def parse(self, argv: Sequence[str]) -> Options:
    """Reads the flags of argv, whose first entry is the program's name."""
    values = self.flag_values(argv)
    try:
      rest = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
      hint = spelling.hint(error.flagname, list(values))
      raise ValueError(
        f"Unknown command line flag {error.flagname!r}; {hint}--help lists them"
      ) from error
    except flags.Error as error:
      raise ValueError(str(error)) from error
    if rest and not self.takes_arguments:
      raise ValueError(f"unexpected argument {rest[0]!r}; flags begin with --")
    for argument in rest:
      remote.check_local("", argument)
    parsers = {name: values[name] for name in values}
    for name, flag in parsers.items():
      large = type(flag.value) is int and abs(flag.value) >= 2**31
      if large and name != "seed":
        raise ValueError(
          f"--{name}={flag.value}; it must be between -2**31 and 2**31"
        )
      if name not in _REMOTE + _TEXTS:
        listed = isinstance(flag.value, list | tuple)
        for value in flag.value if listed else [flag.value]:
          if isinstance(value, str):
            remote.check_local(f"--{name}", value)
    return Options(
      given=frozenset(name for name in values if values[name].present),
      arguments=rest,
      argv=tuple(argv[1:]),
      parsers=parsers,
      # A name with a dot is an entry of a config.
      **{name: x.value for name, x in parsers.items() if "." not in name},
    )

  def help(self, name: str) -> str:
    """Returns the help page: what the program does, and every flag."""
    text = textwrap.dedent(self.doc).strip()
    listed = self.flag_values([name]).get_help().partition("\nabsl.flags:")[0]
    return f"{text}\n\nFlags:\n{listed.rstrip()}\n"

  def __call__(self, argv: Sequence[str]) -> None:
    """Runs the program; ends the process with a sentence on an error."""
    name = pathlib.Path(argv[0]).stem.rpartition(" ")[2]
    if any(argument in _HELP for argument in argv[1:]):
      print(self.help(name), end="")
      return
    try:
      self.work(self.parse(argv))
      files.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
      sys.stdout = open(os.devnull, "w")  # noqa: SIM115
      sys.exit(1)
    except _MENDABLE as error:
      _unhush()
      _end(f"{name}: {str(error) or _no_memory(error)}{user_line(error)}")
    except KeyboardInterrupt:
      _end(f"{name}: {self.interrupted}")
    except Exception as error:
      _unhush()
      if "RESOURCE_EXHAUSTED" in str(error):  # of XLA's allocator
        _end(f"{name}: {_no_memory(error)}")
      if jax.distributed.is_initialized():
        _end(traceback.format_exc())
      raise
    finally:
      run_folder.release()

  def launch(self, argv: Sequence[str] | None = None) -> None:
    """Runs the program from a shell, without the chatter of libraries."""
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
    flags.FLAGS.mark_as_parsed()  # absl's own keep their defaults
    # A job that is ended, as a preempted one, leaves what Ctrl-C leaves.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app.run(self, list(argv or sys.argv), flags_parser=list)


def _no_memory(error: Exception) -> str:
  """What to do where an allocator gave up."""
  if not isinstance(error, MemoryError | RuntimeError):
    return type(error).__name__
  what = (str(error).splitlines() or ["no more could be allocated"])[0]
  smaller = "take a smaller --batch, --max_new_tokens, prompt or model"
  if jax.default_backend() != "cpu":  # which multiplies in float32
    smaller += ", or --dtype=bfloat16"
  return f"out of memory ({what}); {smaller}"


def _end(text: str) -> None:
  """Ends with an error."""
  text = terminal.escape(text)
  if not jax.distributed.is_initialized():
    sys.exit(text)
  # An orderly end would wait for the other processes, who wait for this one;
  # JAX then ends them, as it misses one.
  print(text, file=sys.stderr, flush=True)
  os._exit(1)


def _quiet_libtpu() -> None:
  """Names a TPU's kind and hosts where there is none: libtpu, if installed,
  is opened all the same and would miss both in five lines."""
  chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
  # JAX sets it where it sees no chip.
  if os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and not chips:
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def _excepthook(*error) -> None:
  """Prints a traceback, escaped."""
  note("".join(traceback.format_exception(*error)).rstrip())


def _unraisablehook(unraisable) -> None:
  """Prints an uncaught error, but for TensorStore's after one of Orbax."""
  if str(unraisable.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(unraisable)


def hush() -> None:
  """Prints nothing from now on, but for the error that ends the program."""
  sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _unhush() -> None:
  if getattr(sys.stderr, "name", None) == os.devnull:
    sys.stderr = sys.__stderr__


def check_at_least(options: Options, low: int, *names: str) -> None:
  """Raises ValueError where one of these flags holds a number below `low`."""
  for name in names:
    for number in np.ravel(getattr(options, name)):
      if number is not None and number < low:
        raise ValueError(f"--{name}={number}; it must be >= {low}")


def note(text: str) -> None:
  """Prints on standard error."""
  terminal.report(text, file=sys.stderr)


def report_use(output: pathlib.Path, *flags: str) -> None:
  """Prints the command that decodes with a folder that was written; what lies
  in a bucket has to be copied first."""
  if not remote.is_remote(output):
    command = shlex.join(["python", "scripts/generate.py", *flags])
    terminal.report(f"to use it: {command}")


def take_folder(name: str, path: str | None) -> pathlib.Path:
  """Locks the folder `path`, given as `name`, and returns it; refuses one that
  cannot be written, or that another process has."""
  if not path:
    raise ValueError(f"give {name}, a folder")
  check_folder(name, path)
  folder = remote.as_path(path)
  run_folder.lock(folder)
  return folder


def check_folder(name: str, path: str) -> None:
  """Raises ValueError where a folder, given as `name`, could not be written,
  or created, by the process that writes."""
  if not multihost.is_first():
    return
  if remote.is_remote(path):
    remote.check_writable(name, path)
    return
  folder = pathlib.Path(path).absolute()
  present = next(x for x in (folder, *folder.parents) if os.path.lexists(x))
  if not present.is_dir():
    whole = "" if present == folder else f": {present}"
    raise ValueError(f"{name}={path}{whole} is not a folder; name a folder")
  if not os.access(present, os.W_OK | os.X_OK):
    raise ValueError(f"{name}={path} cannot be written; choose another place")


def new_folder(name: str, path: str) -> pathlib.Path:
  """As check_folder, and refuses a folder that holds something; returns it."""
  folder = remote.as_path(path).expanduser()
  check_folder(name, str(folder))
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f"{folder} is not empty; name another folder")
  return folder


def check_writable(name: str, path: str | None) -> None:
  """Raises ValueError where a file, given as `name`, could not be written by
  the process that writes."""
  if path == "":
    raise ValueError(f"{name} is empty; give a file")
  if path is None or not multihost.is_first():
    return
  if remote.is_remote(path):
    remote.check_writable(name, path)
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


def named_folders(patterns: Sequence[str]) -> list[pathlib.Path]:
  """Returns the folders that names or patterns stand for, each once."""
  folders: list[str] = []
  for pattern in patterns:
    matches = [*filter(os.path.isdir, sorted(glob.glob(pattern)))]
    if not matches:
      raise ValueError(f"{pattern} names no folder")
    folders += matches
  return [*dict.fromkeys(map(pathlib.Path, folders))]
