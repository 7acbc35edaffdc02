"""The flags that say what is decoded and how: those of a Setup, and its texts.

Shared by the programs that decode, so that a command of one is a command of the
others. `--config` names a Python file whose get_config() gives values for flags
that are not on the command line.
"""

import dataclasses
import pathlib
import socket
import time
from collections.abc import Sequence

import jax

from specdec import checkpoints, multihost
from specdec.benchmark import catalog, prompts, provenance
from specdec.benchmark.setup import Setup
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import PACKAGES
from specdec.cli import app, config_flag
from specdec.cli.app import Flags, Options
from specdec.models import presets
from specdec.utils.spelling import choices

FIELDS = tuple(
  field.name
  for field in dataclasses.fields(Setup)
  if field.name != "prompt_size"
)
# What says how processes meet, and nothing about the work.
PROCESSES = ("coordinator", "distributed", "patience", "process", "processes")
# What says how tokens are drafted and accepted, and sampled.
DRAFTING = ("drafter", "acceptance", "shape", "k", "draft_ways")
DECODING = (*DRAFTING, "temperature", "top_k", "top_p", "chat")
# What does not change the results.
FREE = ("output", "json", "compilation_cache", *PROCESSES)
_GRAMMAR = "A call, as name(1, key=2), or of your own: file.py:name(...). "


def define_mesh(flags: Flags) -> None:
  """Defines over which devices and processes a program runs."""
  flags.string(
    "mesh",
    None,
    "data:N,model:M: N groups of M devices; each group has all weights, and "
    "shares out heads, inner columns and vocabulary among its M. Default: one "
    "device; to train, rows over all there are.",
  )
  flags.integer(
    "draft_ways",
    None,
    "Of the M, how many share the draft's weights; 1: each has all of them. "
    "Default: M.",
  )
  flags.bool(
    "distributed",
    False,
    "This process is one of several, each with devices of its own. On TPU "
    "slices and under SLURM it finds the others by itself.",
  )
  flags.string("coordinator", None, "With --distributed: address:port of 0.")
  flags.integer("processes", None, "With --coordinator: how many.")
  flags.integer("process", None, "With --coordinator: which, from 0 on.")
  flags.integer(
    "patience", 60, "With --distributed: seconds to wait for the others."
  )


def define(
  flags: Flags, auto: bool = False, without: Sequence[str] = ()
) -> None:
  """Defines them.

  Args:
    auto: --k=auto is accepted.
    without: names of flags that the program has no use for.
  """
  flags = flags.without(without)
  flags.config("config", "File whose get_config() sets flags not given here.")
  flags.string(
    "target",
    shipped.TARGET,
    "Model whose text is wanted: a directory in Hugging Face's or Orbax's "
    "layout, a .gguf file, a hub name, one of "
    f"{', '.join([*shipped.names(), *PACKAGES])}, or, with --random_weights, "
    "preset:NAME.",
  )
  flags.string(
    "drafter",
    None,
    _GRAMMAR + "lookup(ngram=5, min_ngram=3), model(NAME), early_exit(LAYER), "
    "layer_skip(attention=[1,3], mlp=[2], threshold=0.8), layer_skip(FILE) of "
    "choose_layers, head(FILE) of train or one of "
    f"{', '.join(shipped.drafters())}. Two with | between them: the second "
    "drafts where the first has no draft: 'lookup(k=4) | head(FILE)'. Default "
    f"lookup, for {shipped.TARGET} model({shipped.DRAFT}).",
  )
  flags.string(
    "acceptance",
    "coupled",
    _GRAMMAR + "coupled: token for token the text of autoregressive sampling "
    "with this seed. rejection: the same distribution, other noise, accepts "
    "sampled drafts more often. block: the same distribution, evaluates a "
    "chain as a whole and accepts most. kseq: the same distribution, for iid "
    "chains. naive: the same distribution, accepts where a sample of the "
    "target is the drafted token. greedy: temperature 0 only. Lossy: "
    "lenience(share=0.5), typical(epsilon=0.09, delta=0.3), relaxed(top=10, "
    "margin=0.6). synthetic(0.8) accepts at that rate whatever was drafted, to "
    "study speed; the text is meaningless.",
  )
  flags.string(
    "shape",
    "chain",
    "A call. chain: k tokens in a row. chains(3): so many chains of k tokens; "
    "chains(3, shared=1): they share the first. optimal(12, [0.6, 0.2]): the "
    "static tree of 12 draft tokens, at most k deep, that keeps most if a "
    "node's first, second ... child is kept so often. dynamic(16, top=4): "
    "EAGLE-2's tree, k deep. paths(FILE): JSON, [[0], [1], [0, 0], ...], each "
    "the child to take at every step, from 0. All but dynamic take "
    "siblings=iid, without_replacement or deterministic.",
  )
  default_k = ", ".join(f"{k} with {n}" for n, k in catalog.DEFAULT_K.items())
  flags.integers(
    "k",
    None,
    "Drafted tokens a round, 0 for none; of a tree its levels; default "
    f"{default_k}, else {catalog.OTHER_K}."
    + (" auto: what pays here." if auto else ""),
    auto=auto,
  )
  flags.float("temperature", 0.0, "0 is greedy.")
  flags.integer("top_k", None, "Sample among the k likeliest tokens.")
  flags.float("top_p", None, "Sample among the likeliest of this mass.")
  flags.integer(
    "seed",
    0,
    "Of all noise; a prompt's number is mixed in.",
    lower_bound=-(2**31),
    upper_bound=2**32 - 1,  # beyond, JAX takes the lowest bits
  )
  flags.integer("max_new_tokens", 128, "A row stops here at the latest.")
  flags.integers("batch", "1", "Prompts decoded together.")
  flags.enum("dtype", "float32", checkpoints.DTYPES, "Of the weights.")
  flags.bool(
    "random_weights",
    False,
    "Take shapes only, and random weights: for speed, not for text. Presets: "
    f"{', '.join(presets.names())}.",
  )
  flags.strings(
    "prompt_file",
    "Text file (one prompt), or JSONL with prompt, text, turns or token_ids; "
    "repeatable.",
  )
  flags.bool("chat", False, "Wrap prompts in the chat template.")
  flags.string(
    "json",
    None,
    "Write the results here (docs/schema.json says what they are).",
  )
  flags.string(
    "compilation_cache",
    "~/.cache/specdec/xla",
    "Folder that keeps compiled programs between runs; '' for none.",
  )
  define_mesh(flags)


def read(options: Options, **changes) -> None:
  """Applies --config, meets the other processes, and checks every Setup.

  Args:
    changes: fields of a Setup that the program sets itself.

  Raises:
    ValueError: a flag, or flags together, are refused.
  """
  apply_config(options)
  join(options)  # before anything wakes JAX
  options.k = getattr(options, "k", None)
  app.check_at_least(options, 0, "k")
  app.check_at_least(options, 1, "batch", "max_new_tokens")
  for k in options.k or (None,):
    for batch in options.batch:
      setup_of(options, **{"k": k, "batch": batch} | changes)
  for file in getattr(options, "prompt_file", ()):
    prompts.scan(file)  # is there any?
  app.check_writable("--json", getattr(options, "json", None))
  if getattr(options, "compilation_cache", None):
    folder = pathlib.Path(options.compilation_cache).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))


def apply_config(options: Options) -> None:
  """Sets what --config says and the command line does not."""
  accepted = [n for n in options.parsers if n != "config" and "." not in n]
  for name, value in (options.config or {}).items():
    if name not in accepted:
      raise ValueError(f"--config sets {name!r}; {choices(name, accepted)}")
    if name not in options.given:
      parsed = config_flag.parsed(options.parsers[name], value)
      setattr(options, name, parsed)
      options.given |= {name}


def setup_of(options: Options, **changes) -> Setup:
  """Returns the Setup that the flags describe.

  Args:
    changes: fields that are set otherwise; k and batch must be among them where
      the flags have several.
  """
  values = {n: getattr(options, n) for n in FIELDS if hasattr(options, n)}
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
  k = max(options.k) if options.k else getattr(options, "most_k", None)
  k = None if options.k is None else k
  return setup_of(options, k=k, batch=max(options.batch), **changes)


def refuse(options: Options, names: Sequence[str], why: str) -> None:
  """Raises ValueError where one of these flags is given."""
  for name in names:
    if name in options.given:
      raise ValueError(f"--{name} {why}")


def header(options: Options, setup: Setup) -> dict:
  """Returns the head of a JSON document: flags, versions, machine, caveats."""
  settings = {
    name: getattr(options, name)
    for name in sorted(options.parsers)
    if name not in ("json", "config") and "." not in name
  }
  if "drafter" in settings:
    settings["drafter"] = setup.drafter
  if checksums := setup.checksums():
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
  """Meets the other processes, if there are any; all but process 0 fall silent.

  Raises:
    ValueError: half of an address was given.
    ConnectionError: they cannot be reached.
  """
  if not hasattr(options, "distributed"):
    return
  address = options.processes, options.process
  given = [number is not None for number in address]
  if given != [options.coordinator is not None] * 2:
    raise ValueError("--coordinator, --processes and --process go together")
  if all(given) and not 0 <= options.process < options.processes:
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
      options.coordinator,
      *address,
      initialization_timeout=options.patience,
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
  """Waits until the coordinator's port is open.

  Raises:
    ValueError: the address is none.
    ConnectionError: it stays closed.
  """
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
