"""The flags that say what is decoded and how, and the parts they choose.

Shared by the programs that decode, so that a command of one is a command of
the others.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
from absl import flags
from ml_collections import config_flags

from specdec import (
  acceptance,
  checkpoints,
  drafters,
  memory,
  provenance,
  sampling,
  session,
)
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import PACKAGES, fetch
from specdec.models import presets, transformer
from specdec.types import AcceptanceRule, Drafter, Params

RULES = {
  "coupled": acceptance.coupled,
  "greedy": acceptance.greedy,
  "rejection": acceptance.rejection,
  "synthetic": lambda: acceptance.synthetic(FLAGS.rates),
}
DRAFTERS = ("lookup", "model", "early_exit")
# Tokens of a round: each guess of a model costs a pass of it, a copy nothing.
_DEFAULT_K = {"model": 3, "lookup": 5, "early_exit": 3}
_DEFAULT_MIN_NGRAM = 3
_PRESET = "preset:"


def parse_integers(text) -> tuple[int, ...]:
  """'1,2,4-6' as (1, 2, 4, 5, 6); a number or a list is taken as it is."""
  if isinstance(text, int):
    return (text,)
  if not isinstance(text, str):
    return tuple(int(x) for x in text)
  numbers = []
  try:
    for part in text.split(","):
      low, *high = (
        part.strip().rsplit("-", 1) if part.strip()[:1] != "-" else ([part])
      )
      numbers += range(int(low), int(high[0]) + 1) if high else [int(low)]
  except ValueError:
    numbers = []
  if not numbers:
    raise ValueError(f"{text!r} is no list of integers like 4 or 1,2,4-8")
  return tuple(numbers)


class _Integers(flags.ArgumentParser):
  """--k=4, --k=1,2,4, --k=1-8."""

  syntactic_help = "an integer, or several: 1,2,4-8"

  def parse(self, argument):
    return parse_integers(argument)

  def flag_type(self):
    return "integers"


def _define_integers(name: str, default: str | None, text: str) -> None:
  flags.DEFINE(
    _Integers(),
    name,
    default,
    text,
    serializer=flags.CsvListSerializer(","),
  )


config_flags.DEFINE_config_file(
  "config", None, "File whose get_config() sets flags not given here."
)
_BEFORE = set(flags.FLAGS)
flags.DEFINE_string(
  "target",
  shipped.TARGET,
  "Model whose text is wanted: a directory in Hugging Face's or Orbax's "
  "layout, a .gguf file, a hub name, one of "
  f"{', '.join([*shipped.names(), *PACKAGES])}, or, with --random_weights, "
  "preset:NAME.",
)
flags.DEFINE_string(
  "draft",
  None,
  f"Draft model, named like --target; {shipped.DRAFT} for {shipped.TARGET}.",
)
flags.DEFINE_bool(
  "random_weights",
  False,
  "Take shapes only, and random weights: for speed, not for text. Presets: "
  f"{', '.join(presets.names())}.",
)
flags.DEFINE_enum(
  "drafter",
  None,
  DRAFTERS,
  "Who drafts; default model with --draft, early_exit with --exit_layer, else "
  "lookup: copying from prompt and output.",
)
_define_integers(
  "k",
  None,
  "Drafted tokens a round, 0 for none; default "
  + ", ".join(f"{k} with {name}" for name, k in _DEFAULT_K.items())
  + ".",
)
flags.DEFINE_integer("ngram", 5, "Lookup: longest match that is looked for.")
flags.DEFINE_integer(
  "min_ngram",
  None,
  "Lookup: shortest match worth a draft, 0 to draft always; default "
  f"{_DEFAULT_MIN_NGRAM}, and 0 with synthetic acceptance.",
)
flags.DEFINE_integer(
  "exit_layer", None, "Early exit: how many of the target's layers draft."
)
flags.DEFINE_enum(
  "acceptance",
  "coupled",
  sorted(RULES),
  "coupled: token for token the text of plain sampling with this seed. "
  "rejection: the same law, other noise, accepts sampled drafts more often. "
  "greedy: temperature 0 only. synthetic: accepts at --rates whatever was "
  "drafted, to study speed; the text is meaningless.",
)
flags.DEFINE_multi_float(
  "rates",
  [],
  "Synthetic: probability that a token is kept, in [0, 1]; repeat it for "
  "position 1, 2 ... (the last one goes on).",
)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_integer("top_k", None, "Sample among the k likeliest tokens.")
flags.DEFINE_float("top_p", None, "Sample among the likeliest of this mass.")
flags.DEFINE_integer("seed", 0, "Of all noise; a prompt's number is mixed in.")
flags.DEFINE_multi_string(
  "prompt_file",
  [],
  "Text file (one prompt), or JSONL with prompt, text, turns or token_ids; "
  "repeatable.",
)
flags.DEFINE_integer("max_new_tokens", 128, "A row stops here at the latest.")
_define_integers("batch", "1", "Prompts decoded together.")
flags.DEFINE_bool("chat", False, "Wrap prompts in the chat template.")
flags.DEFINE_enum("dtype", "float32", checkpoints.DTYPES, "Of the weights.")
flags.DEFINE_string(
  "json", None, "Write the results here (docs/schema.json says what they are)."
)
flags.DEFINE_string(
  "compilation_cache",
  "~/.cache/specdec/xla",
  "Folder that keeps compiled programs between runs; '' for none.",
)
FLAGS = flags.FLAGS
SHARED = sorted(set(FLAGS) - _BEFORE)  # flags that --config may set


class Models(NamedTuple):
  """What was loaded."""

  target: checkpoints.Checkpoint
  draft: checkpoints.Checkpoint | None

  @property
  def params(self) -> Params:
    return Params(self.target.params, self.draft and self.draft.params)


def settle(own_flags: Sequence[str] = ()) -> None:
  """Brings the flags to their final values and refuses what cannot work.

  Args:
    own_flags: names of the program's own flags, for --config.
  """
  _apply_config([*SHARED, *own_flags])
  _fill_in()
  _check()
  if FLAGS.compilation_cache:
    folder = pathlib.Path(FLAGS.compilation_cache).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))


def single(name: str) -> int:
  """The value of a flag of integers, where a program takes one only."""
  values = getattr(FLAGS, name)
  if len(values) > 1:
    raise ValueError(
      f"--{name}={','.join(map(str, values))}; this program takes one at a time"
    )
  return values[0]


def _apply_config(accepted: list[str]) -> None:
  """Sets flags from --config, except those given on the command line."""
  for name, value in (FLAGS.config or {}).items():
    if name not in accepted:
      raise ValueError(
        f"--config sets {name!r}; accepted: {', '.join(sorted(accepted))}"
      )
    if not FLAGS[name].present:
      if name in ("k", "batch"):
        value = parse_integers(value)
      setattr(FLAGS, name, value)


def _fill_in() -> None:
  """Gives the flags that depend on others their defaults."""
  if FLAGS.drafter is None and FLAGS.exit_layer is not None:
    FLAGS.drafter = "early_exit"
  if FLAGS.target == shipped.TARGET and FLAGS.drafter in (None, "model"):
    FLAGS.draft = FLAGS.draft or shipped.DRAFT
  if FLAGS.drafter is None:
    FLAGS.drafter = "model" if FLAGS.draft else "lookup"
  if FLAGS.k is None:
    FLAGS.k = (_DEFAULT_K[FLAGS.drafter],)
  if FLAGS.min_ngram is None:
    synthetic = FLAGS.acceptance == "synthetic"
    FLAGS.min_ngram = 0 if synthetic else _DEFAULT_MIN_NGRAM


def _check() -> None:
  for name, low in (("k", 0), ("max_new_tokens", 1), ("batch", 1)):
    values = getattr(FLAGS, name)
    least = min(values) if isinstance(values, tuple) else values
    if least < low:
      raise ValueError(f"--{name}={least}; it must be >= {low}")
  sampling.settings(1, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
  if FLAGS.acceptance == "greedy" and FLAGS.temperature > 0:
    raise ValueError(
      f"--acceptance=greedy at --temperature={FLAGS.temperature} would not "
      "sample; take coupled or rejection, or temperature 0"
    )
  if FLAGS.rates and FLAGS.acceptance != "synthetic":
    raise ValueError("--rates is for --acceptance=synthetic")
  rule()
  if FLAGS.drafter == "model" and not FLAGS.draft:
    raise ValueError("--drafter=model needs --draft, the model that drafts")
  if FLAGS.drafter != "model" and FLAGS.draft:
    raise ValueError(f"--drafter={FLAGS.drafter} takes no --draft")
  if (FLAGS.drafter == "early_exit") != (FLAGS.exit_layer is not None):
    raise ValueError(
      "--drafter=early_exit and --exit_layer, the number of layers that draft, "
      "go together"
    )
  if FLAGS.json:
    check_writable("--json", FLAGS.json)


def check_writable(name: str, path: str) -> None:
  """Raises ValueError where `path`, given as `name`, could not be written."""
  file = pathlib.Path(path)
  if file.is_dir():
    raise ValueError(f"{name}={path} is a folder; give a file in it")
  if not file.parent.is_dir():
    raise ValueError(
      f"{name}={path}: there is no folder {file.parent}; make it first"
    )
  if not os.access(file if file.exists() else file.parent, os.W_OK):
    raise ValueError(f"{name}={path} cannot be written; choose another place")


def rule() -> AcceptanceRule:
  """The acceptance rule."""
  return RULES[FLAGS.acceptance]()


def comparable() -> bool:
  """Whether the text should equal plain decoding's, token for token."""
  if not rule().lossless:
    return False
  return FLAGS.temperature == 0 or FLAGS.acceptance == "coupled"


def caveats() -> list[str]:
  """What must be said wherever the results are printed."""
  found = [rule().caveat] if rule().caveat else []
  if FLAGS.random_weights:
    found.append("random weights: nothing follows for a trained model's text")
  return found


def load(max_length: int) -> Models:
  """Target and draft, what they need of memory checked first.

  Args:
    max_length: prompt and output of a row, as far as they are known.
  """
  names = [name for name in (FLAGS.target, FLAGS.draft) if name]
  sources = [n if n.startswith(_PRESET) else fetch(n) for n in names]
  shapes = [_shape(source) for source in sources]
  if FLAGS.random_weights and len(shapes) > 1:
    shapes[1] = dataclasses.replace(shapes[1], vocab_size=shapes[0].vocab_size)
  if FLAGS.drafter == "early_exit":  # is there such a layer?
    drafters.early_exit(transformer.model(shapes[0]), FLAGS.exit_layer, 0)
  check_memory(shapes, max_length)
  if FLAGS.random_weights:
    print(f"random weights for {', '.join(map(str, sources))}", file=sys.stderr)
    models = [
      checkpoints.random(shape, FLAGS.seed + i, str(source))
      for i, (shape, source) in enumerate(zip(shapes, sources))
    ]
  else:
    print(f"loading {', '.join(map(str, sources))}", file=sys.stderr)
    draft = sources[1] if FLAGS.draft else None
    models = checkpoints.load_pair(sources[0], draft, FLAGS.dtype)
  target, draft = [*models, None][:2]
  return Models(target.packed(), draft and draft.packed())


def _shape(source):
  if not str(source).startswith(_PRESET):
    return checkpoints.inspect(source, FLAGS.dtype)
  if not FLAGS.random_weights:
    raise ValueError(f"{source} is a shape alone; add --random_weights")
  return presets.get(source.removeprefix(_PRESET), FLAGS.dtype)


def check_memory(shapes, max_length: int) -> None:
  """Refuses what cannot fit, by the largest batch and k that are asked for."""
  memory.check(
    shapes[0],
    shapes[1] if len(shapes) > 1 else None,
    batch=max(FLAGS.batch),
    max_length=max_length,
    num_nodes=max(FLAGS.k) + 1,
  )


def drafter(models: Models, k: int) -> Drafter:
  """The drafter, for rounds of k tokens."""
  if FLAGS.drafter == "model":
    return drafters.model(transformer.model(models.draft.config), k)
  if FLAGS.drafter == "early_exit":
    target = transformer.model(models.target.config)
    return drafters.early_exit(target, FLAGS.exit_layer, k)
  return drafters.lookup(k, ngram=FLAGS.ngram, min_ngram=FLAGS.min_ngram)


def make_session(
  models: Models,
  k: int,
  batch: int,
  prompt_size: int,
  eos_ids: Sequence[int],
) -> session.Session:
  """One shape's session, not yet compiled."""
  return session.Session(
    transformer.model(models.target.config),
    drafter(models, k),
    rule(),
    models.params,
    key=jax.random.key(FLAGS.seed),
    batch=batch,
    prompt_size=prompt_size,
    max_new_tokens=FLAGS.max_new_tokens,
    eos_ids=eos_ids,
    temperature=FLAGS.temperature,
    top_k=FLAGS.top_k,
    top_p=FLAGS.top_p,
  )


def describe_drafter() -> str:
  """A few words for tables and pages."""
  if FLAGS.drafter == "model":
    return FLAGS.draft
  if FLAGS.drafter == "early_exit":
    return f"early exit after layer {FLAGS.exit_layer}"
  return f"lookup, {FLAGS.min_ngram} to {FLAGS.ngram} tokens"


def header(own_flags: Sequence[str] = ()) -> dict:
  """The head of a JSON document."""
  names = [n for n in [*SHARED, *own_flags] if n not in ("json", "config")]
  settings = {name: getattr(FLAGS, name) for name in names}
  return provenance.header(settings, caveats())
