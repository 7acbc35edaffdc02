"""The flags that say what is decoded and how: those of a Setup, and its texts.

Shared by the programs that decode, so that a command of one is a command of the
others. `--config` names a Python file whose get_config() gives values for flags
that are not on the command line.
"""

import dataclasses
import inspect
import pathlib
import re
import socket
import time
from collections.abc import Mapping, Sequence

import jax

from specdec import checkpoints, multihost
from specdec.benchmark import catalog, prompts, provenance
from specdec.benchmark.settings import Settings, kind_of
from specdec.benchmark.setup import Setup
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import PACKAGES
from specdec.cli import app
from specdec.cli.app import Options
from specdec.cli.flags import ADAPTIVE, Flags, parsed
from specdec.models import presets
from specdec.utils import remote
from specdec.utils.spelling import choices

# What says how processes meet, and nothing about the work.
PROCESSES = ("coordinator", "distributed", "patience", "process", "processes")
# What says how tokens are drafted and accepted, and sampled.
DRAFTING = ("drafter", "acceptance", "shape", "k", "draft_ways")
DECODING = (*DRAFTING, "temperature", "top_k", "top_p", "chat")
# What does not change the results.
FREE = ("output", "json", "compilation_cache", *PROCESSES)


def _texts() -> dict[str, str]:
  """Returns what `Settings` says of each field, with the valid names."""
  attributes = inspect.getdoc(Settings).partition("Attributes:\n")[2]
  entries = re.findall(r"^  (\w+): (.*?)(?=^  \w|\Z)", attributes, re.M | re.S)
  default_k = (f"{k} with {name}" for name, k in catalog.DEFAULT_K.items())
  names = {
    "target": f"Ours: {', '.join([*shipped.names(), *PACKAGES])}.",
    "drafter": f"Heads of ours: {', '.join(shipped.drafters())}.",
    "k": f"Default {', '.join(default_k)}, else {catalog.OTHER_K}.",
    "random_weights": f"Presets: {', '.join(presets.names())}.",
  }
  return {
    name: " ".join([*text.split(), names.get(name, "")]).strip()
    for name, text in entries
  }


def define_mesh(flags: Flags) -> None:
  """Defines over which devices and processes a program runs."""
  texts = _texts()
  mesh = f"{texts['mesh']} To train: rows over all there are."
  flags.string("mesh", None, mesh)
  flags.integer("draft_ways", None, texts["draft_ways"])
  flags.bool(
    "distributed",
    False,
    "This process is one of several, each with devices of its own. On TPU "
    "slices and under SLURM it finds the others by itself.",
  )
  flags.string(
    "coordinator", None, "With --distributed: HOST:PORT of process 0."
  )
  flags.integer("processes", None, "With --coordinator: how many.")
  flags.integer("process", None, "With --coordinator: which, from 0 on.")
  flags.integer(
    "patience", 60, "With --distributed: seconds to wait for the others."
  )


def define(
  flags: Flags, auto: bool = False, without: Sequence[str] = ()
) -> None:
  """Defines them, without those that the program has no use for; with `auto`
  --k=auto and --k=adaptive are accepted."""
  flags, texts = flags.without(without), _texts()
  flags.config("config", "File whose get_config() sets flags not given here.")
  kinds = {str: flags.string, int: flags.integer}
  kinds |= {float: flags.float, bool: flags.bool}
  others = "k", "batch", "dtype", "prompt_size", "mesh", "draft_ways"
  for field in dataclasses.fields(Setup):
    if field.name not in others:
      kinds[kind_of(field)](field.name, field.default, texts[field.name])
  pays = " auto: what pays here." if auto else ""
  pays += " adaptive: up to --most_k, what pays in each round." if auto else ""
  flags.integers("k", None, texts["k"] + pays, auto=auto)
  flags.integers("batch", "1", texts["batch"])
  flags.enum("dtype", "float32", checkpoints.DTYPES, texts["dtype"])
  flags.strings(
    "prompt_file",
    [],
    "Text file (one prompt), or JSONL with prompt, text, turns or token_ids; "
    "repeatable.",
  )
  flags.bool("chat", False, "Wrap prompts in the chat template.")
  flags.string(
    "json",
    None,
    "Write the results here (docs/schema.json says what they are).",
  )
  define_cache(flags)
  define_mesh(flags)


def read(options: Options, **changes) -> None:
  """Applies --config, meets the other processes, and checks every Setup, with
  the changes that the program makes itself."""
  apply_config(options)
  join(options)  # before anything wakes JAX
  options.k = getattr(options, "k", None)
  options.adaptive = options.k == ADAPTIVE
  options.k = () if options.adaptive else options.k
  app.check_at_least(options, 0, "k")
  app.check_at_least(options, 1, "batch", "max_new_tokens")
  for k in options.k or (None,):
    for batch in options.batch:
      setup_of(options, **{"k": k, "batch": batch} | changes)
  for file in getattr(options, "prompt_file", ()):
    prompts.scan(file)  # is there any?
  app.check_writable("--json", getattr(options, "json", None))
  use_cache(getattr(options, "compilation_cache", None))


def define_cache(flags: Flags) -> None:
  flags.string(
    "compilation_cache",
    "~/.cache/specdec/xla",
    "Folder that keeps compiled programs between runs; '' for none.",
  )


def use_cache(folder: str | None) -> None:
  """Keeps compiled programs in a folder, if one is given."""
  if folder:
    remote.check_local("--compilation_cache", folder)
    place = pathlib.Path(folder).expanduser()
    if place.exists() and not place.is_dir():
      raise ValueError(f"--compilation_cache={folder} is no folder")
    jax.config.update("jax_compilation_cache_dir", str(place))


def apply_config(options: Options) -> None:
  """Sets what --config says and the command line does not."""
  accepted = [n for n in options.parsers if n != "config" and "." not in n]
  for name, value in (options.config or {}).items():
    if name not in accepted:
      raise ValueError(f"--config sets {name!r}; {choices(name, accepted)}")
    if name not in options.given:
      setattr(options, name, parsed(options.parsers[name], value))
      options.given |= {name}


def setup_of(options: Options, **changes) -> Setup:
  """Returns the Setup that the flags describe, but for changes: k and batch
  must be among them where the flags have several."""
  names = (field.name for field in dataclasses.fields(Setup))
  values = {n: getattr(options, n) for n in names if hasattr(options, n)}
  for name in ("k", "batch"):
    if name not in changes:
      values[name] = single(options, name)
  return Setup(**values | changes)


def single(options: Options, name: str) -> int | None:
  """Returns the value of a flag of integers where one alone is possible."""
  numbers = getattr(options, name)
  if numbers is not None and len(numbers) != 1:
    given = ",".join(map(str, numbers)) or "auto"
    raise ValueError(f"--{name}={given}; this program takes one number")
  return numbers[0] if numbers else None


def largest(options: Options, **changes) -> Setup:
  """Returns the Setup of the largest batch and k: what must fit."""
  most = getattr(options, "most_k", None)
  k = max(options.k) if options.k else None if options.k is None else most
  setup = setup_of(options, k=k, batch=max(options.batch), **changes)
  if getattr(options, "length", ()) and setup.levels < most:
    return dataclasses.replace(setup, k=most)
  return setup


def refuse(options: Options, names: Sequence[str], why: str) -> None:
  """Raises ValueError where one of these flags is given."""
  for name in names:
    if name in options.given:
      raise ValueError(f"--{name} {why}")


def refuse_others(
  options: Options, name: str, flags: Mapping[str, Sequence[str]]
) -> None:
  """As `refuse`, for the flags of every other value of --NAME."""
  value = getattr(options, name)
  others = {x for names in flags.values() for x in names} - {*flags[value]}
  refuse(options, sorted(others), f"has no effect with --{name}={value}")


def header(
  options: Options, setup: Setup, others: Sequence[Setup] = ()
) -> dict:
  """Returns the head of a JSON document: flags, versions, machine, caveats.

  Args:
    others: setups whose files count as well.
  """
  settings = {
    name: getattr(options, name)
    for name in sorted(options.parsers)
    if name not in ("json", "config") and "." not in name
  }
  if getattr(options, "adaptive", False):
    settings["k"] = "adaptive"
  if "drafter" in settings:
    settings["drafter"] = setup.drafter
  checksums = {}
  for one in (setup, *others):
    checksums |= one.checksums()
  if checksums:
    settings["file_checksums"] = checksums
  return provenance.header(settings, setup.caveats)


def check_chat(options: Options, tokenizer) -> None:
  """Raises ValueError where --chat asks for a template that is not there."""
  if options.chat and (tokenizer is None or tokenizer.chat_template is None):
    raise ValueError(
      f"--chat: {options.target} has no chat template; leave --chat out, or "
      "take a model that was trained to chat"
    )


def join(options: Options) -> None:
  """Meets the other processes, if there are any, or raises ConnectionError; all
  but process 0 fall silent."""
  if not hasattr(options, "distributed"):
    return
  address = options.coordinator, options.processes, options.process
  if address.count(None) not in (0, len(address)):
    raise ValueError("--coordinator, --processes and --process go together")
  if None not in address and not 0 <= options.process < options.processes:
    raise ValueError(
      f"--process={options.process}; it must be in 0..{options.processes - 1}"
    )
  if options.coordinator and not options.distributed:
    raise ValueError("--coordinator is for --distributed")
  if options.distributed and options.mesh is None:
    raise ValueError("--distributed needs --mesh: over what to work together")
  if not options.distributed or jax.distributed.is_initialized():
    return
  if options.process:
    _wait_for_port(options)  # JAX would end the process without a sentence
  try:
    jax.distributed.initialize(
      *address, initialization_timeout=options.patience
    )
  except (RuntimeError, ValueError) as error:
    where = options.coordinator or "a coordinator (give --coordinator)"
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConnectionError(
      f"--distributed: {where} was not reached in {options.patience} s: "
      f"{reason}"
    ) from error
  if not multihost.is_first():
    app.hush()


def _wait_for_port(options: Options) -> None:
  """Waits until the coordinator's port is open, or raises ConnectionError."""
  host, _, port = options.coordinator.rpartition(":")
  if not (host and port.isdecimal()):
    raise ValueError(f"--coordinator={options.coordinator}; give address:port")
  end = time.monotonic() + options.patience
  while True:
    try:
      socket.create_connection((host, int(port)), timeout=1.0).close()
      return
    except OSError as error:
      if time.monotonic() > end:
        raise ConnectionError(
          f"--coordinator={options.coordinator} was not reached in "
          f"{options.patience} s: {error}"
        ) from error
      time.sleep(0.2)
