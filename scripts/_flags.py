"""The flags that say what is decoded and how.

Shared by the programs that decode, so that a command of one is a command of
the others.
"""

import pathlib
from collections.abc import Sequence

import _config
import _main
import _mesh
import _rules
import _shapes
import _skips
import jax
from _integers import IntegersOrAuto, define_integers
from absl import flags

from specdec import checkpoints, decode, draft_shape, drafters, sampling
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import PACKAGES
from specdec.models import presets

# Tokens of a round: each draft token of a model costs a pass of it, a copy
# nothing.
_DEFAULT_K = {
  "lookup": 5,
  "model": 3,
  "early_exit": 3,
  "layer_skip": 3,
  "learned": 4,
}
DRAFTERS = tuple(_DEFAULT_K)
_DEFAULT_MIN_NGRAM = 3
_DEFAULT_COPY_MIN_NGRAM = (
  2  # found on held-out answers: docs/results/smollm2.md
)
PRESET = "preset:"


_config.define("config", "File whose get_config() sets flags not given here.")
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
  "Who drafts; default model with --draft, early_exit with --exit_layer, "
  "layer_skip with --skip or one of --skip_*, learned with --learned, else "
  "lookup: copying from prompt and output.",
)
define_integers(
  "k",
  None,
  "Drafted tokens a round, 0 for none; of a tree its levels; default "
  + ", ".join(f"{k} with {name}" for name, k in _DEFAULT_K.items())
  + ". auto (generate, bench): what pays here.",
  IntegersOrAuto(),
)
flags.DEFINE_string("shape", "chain", "Of a draft. " + _shapes.HELP)
flags.DEFINE_enum(
  "siblings",
  None,
  draft_shape.KINDS,
  "How a tree's children are drawn; default iid with k-SEQ, deterministic in a "
  "dynamic tree and at temperature 0, else without_replacement.",
)
flags.DEFINE_list(
  "rank_acceptance",
  [],
  "For --shape=optimal: how often a node's first, second ... child is kept.",
)
flags.DEFINE_integer("ngram", 5, "Lookup: longest match that is looked for.")
flags.DEFINE_integer(
  "min_ngram",
  None,
  "Lookup: shortest match worth a draft, 0 to draft always; default "
  f"{_DEFAULT_MIN_NGRAM}, {_DEFAULT_COPY_MIN_NGRAM} with --copy_first, 0 with "
  "synthetic acceptance.",
)
flags.DEFINE_integer(
  "copy_first",
  0,
  "Learned: where lookup finds a match, copy so many tokens instead of k "
  "draft tokens; 0: never.",
)
flags.DEFINE_integer(
  "exit_layer", None, "Early exit: how many of the target's layers draft."
)
flags.DEFINE_string(
  "learned",
  None,
  "Drafter on the target's hidden states: a file of train_drafter.py, or, for "
  f"{shipped.TARGET}, one of {', '.join(shipped.drafters()) or 'none'}.",
)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
flags.DEFINE_integer("top_k", None, "Sample among the k likeliest tokens.")
flags.DEFINE_float("top_p", None, "Sample among the likeliest of this mass.")
flags.DEFINE_integer(
  "seed",
  0,
  "Of all noise; a prompt's number is mixed in.",
  lower_bound=-(2**31),
  upper_bound=2**32 - 1,  # beyond, JAX takes the lowest bits
)
flags.DEFINE_multi_string(
  "prompt_file",
  [],
  "Text file (one prompt), or JSONL with prompt, text, turns or token_ids; "
  "repeatable.",
)
flags.DEFINE_integer("max_new_tokens", 128, "A row stops here at the latest.")
define_integers("batch", "1", "Prompts decoded together.")
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
for _module in (_rules, _mesh, _skips):
  flags.adopt_module_key_flags(_module)
_PARTS = {*_rules.OWN, *_mesh.OWN, *_skips.OWN}
SHARED = sorted(
  {*FLAGS, *_PARTS} - (_BEFORE - _PARTS)
)  # flags that --config may set


def settle(
  own_flags: Sequence[str] = (), any_rule: bool = False, auto: bool = False
) -> None:
  """Brings the flags to their final values and refuses what cannot work.

  Args:
    own_flags: names of the program's own flags, for --config.
    any_rule: the program tries all rules, not --acceptance.
    auto: the program knows --k=auto; it finds () in FLAGS.k then.
  """
  _apply_config([*SHARED, *own_flags])
  _mesh.join()  # before anything wakes JAX
  if FLAGS.k == () and not auto:
    raise ValueError("--k=auto is for generate and bench; give a number")
  _fill_in()
  _check(any_rule)
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


def expansion(k: int) -> draft_shape.DraftShape | None:
  """The draft's shape for k levels; None for a chain."""
  if FLAGS.acceptance == "kseq":
    usual = "iid"
  elif FLAGS.temperature == 0:
    usual = "deterministic"  # such a distribution has but one token to draw
  else:
    usual = "without_replacement"
  try:
    ranks = [float(rate) for rate in FLAGS.rank_acceptance]
  except ValueError as error:
    raise ValueError(f"--rank_acceptance: {error}") from None
  return _shapes.parse(FLAGS.shape, k, FLAGS.siblings, usual, ranks)


def num_nodes(k: int) -> int:
  """Tokens that the target verifies in a full round."""
  shape = expansion(k)
  if shape is None:
    return max(k, FLAGS.copy_first) + 1
  return shape.spec.max_nodes


def _apply_config(accepted: list[str]) -> None:
  """Sets flags from --config, except those given on the command line."""
  for name, value in (FLAGS.config or {}).items():
    if name not in accepted:
      raise ValueError(
        f"--config sets {name!r}; accepted: {', '.join(sorted(accepted))}"
      )
    if not FLAGS[name].present:
      setattr(FLAGS, name, _config.parsed(FLAGS[name], value))
  _main.check_integers()


def _fill_in() -> None:
  """Gives the flags that depend on others their defaults."""
  _skips.fill_in()
  if FLAGS.drafter is None and FLAGS.exit_layer is not None:
    FLAGS.drafter = "early_exit"
  if FLAGS.drafter is None and FLAGS.learned is not None:
    FLAGS.drafter = "learned"
  if FLAGS.drafter is None and _skips.skip() is not None:
    FLAGS.drafter = "layer_skip"
  if FLAGS.target == shipped.TARGET and FLAGS.drafter in (None, "model"):
    FLAGS.draft = FLAGS.draft or shipped.DRAFT
  if FLAGS.drafter is None:
    FLAGS.drafter = "model" if FLAGS.draft else "lookup"
  if FLAGS.k is None:
    FLAGS.k = (_DEFAULT_K[FLAGS.drafter],)
  if FLAGS.min_ngram is None:
    synthetic = FLAGS.acceptance == "synthetic"
    usual = 0 if synthetic else _DEFAULT_MIN_NGRAM
    FLAGS.min_ngram = _DEFAULT_COPY_MIN_NGRAM if FLAGS.copy_first else usual


def _check(any_rule: bool) -> None:
  for name in ("target", "learned", "skip", "mesh"):  # --draft= is none
    if getattr(FLAGS, name) == "":
      raise ValueError(f"--{name} is empty; give a name or leave it out")
  most = max(*FLAGS.k, FLAGS.copy_first, 0)
  if most > _shapes.MOST:
    raise ValueError(f"{most:,} tokens a draft; at most {_shapes.MOST:,}")
  numbers = {"k": 0, "max_new_tokens": 1, "batch": 1, "copy_first": 0}
  for name, low in numbers.items():
    values = getattr(FLAGS, name)
    least = min(values, default=low) if isinstance(values, tuple) else values
    if least < low:
      raise ValueError(f"--{name}={least}; it must be >= {low}")
  sampling.settings(1, FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
  if FLAGS.acceptance == "greedy" and FLAGS.temperature > 0:
    raise ValueError(
      f"--acceptance=greedy at --temperature={FLAGS.temperature} would not "
      "sample; take coupled or rejection, or temperature 0"
    )
  rule = _rules.RULES[FLAGS.acceptance]()  # are its numbers right?
  for k in FLAGS.k:
    shape = expansion(k)
    if shape is not None and FLAGS.drafter == "lookup":
      raise ValueError(
        f"--shape={FLAGS.shape}: lookup drafts chains; take --draft, "
        "--exit_layer or --learned"
      )
    if shape is not None:
      decode.check_pair(shape.spec, rule)
      borrows = FLAGS.drafter in ("early_exit", "layer_skip")
      if borrows and shape.num_run > shape.spec.max_nodes:
        raise ValueError(
          f"--shape={FLAGS.shape} tries {shape.num_run} nodes to keep "
          f"{shape.spec.max_nodes}, and the target's cache has room for those: "
          f"with {FLAGS.drafter} keep more, or give a smaller TOP or --k"
        )
    elif FLAGS.drafter == "lookup":
      decode.check_pair(drafters.lookup(k).spec, rule)
  if FLAGS.shape == "chain" and FLAGS.siblings:
    raise ValueError("--siblings is for trees: give --shape")
  if FLAGS.rank_acceptance and not FLAGS.shape.startswith("optimal"):
    raise ValueError("--rank_acceptance is for --shape=optimal:N")
  if FLAGS.shape.endswith(".json") and len(FLAGS.k) > 1:
    raise ValueError(f"--shape={FLAGS.shape} is one tree, whatever --k says")
  if not any_rule:
    _rules.check_flags()
  if FLAGS.drafter == "model" and not FLAGS.draft:
    raise ValueError("--drafter=model needs --draft, the model that drafts")
  if FLAGS.drafter != "model" and FLAGS.draft:
    raise ValueError(f"--drafter={FLAGS.drafter} takes no --draft")
  if (FLAGS.drafter == "early_exit") != (FLAGS.exit_layer is not None):
    raise ValueError(
      "--drafter=early_exit and --exit_layer, the number of layers that draft, "
      "go together"
    )
  if (FLAGS.drafter == "learned") != (FLAGS.learned is not None):
    raise ValueError(
      "--drafter=learned and --learned, the file of the drafter, go together"
    )
  if FLAGS.copy_first and (
    FLAGS.drafter != "learned" or FLAGS.shape != "chain"
  ):
    raise ValueError("--copy_first is for chains of --learned")
  if FLAGS.copy_first and not FLAGS.k:
    raise ValueError("--copy_first: give a number for --k, not auto")
  if FLAGS.copy_first:
    drafters.lookup(
      FLAGS.copy_first, ngram=FLAGS.ngram, min_ngram=FLAGS.min_ngram
    )
    if not FLAGS.min_ngram:
      raise ValueError(
        "--copy_first with --min_ngram=0 would copy always, and --learned "
        "would never be asked"
      )
  _skips.check_flags()
  if FLAGS.json:
    _main.check_writable("--json", FLAGS.json)
