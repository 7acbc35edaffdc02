"""What layer skip leaves out of the target: --skip and its relatives."""

import json
import pathlib

from _integers import define_integers, parse_integers, spans
from absl import flags

from specdec.drafters import Threshold
from specdec.types import Skip

_BEFORE = set(flags.FLAGS)
define_integers(
  "skip_attention",
  None,
  "Layer skip: layers, from 0 on, whose attention the draft leaves out.",
)
define_integers("skip_mlp", None, "Layer skip: layers without their MLP.")
flags.DEFINE_string(
  "skip",
  None,
  "Layer skip: both, and --k and --exit_threshold where not given, from the "
  "skip.json of choose_layers.",
)
flags.DEFINE_float(
  "exit_threshold",
  None,
  "Layer skip: stop drafting at a token less likely than this, by the draft; "
  "it adapts from there, row by row. The paper's: 0.8 greedy, 0.5 to sample.",
)
FLAGS = flags.FLAGS
OWN = sorted(set(FLAGS) - _BEFORE)


def fill_in() -> None:
  """Takes what --skip says; --k and --exit_threshold only if not given.

  Raises:
    ValueError: they were given as well, or it says something else.
  """
  if not FLAGS.skip:
    return
  if any(FLAGS[name].present for name in ("skip_attention", "skip_mlp")):
    raise ValueError("--skip says what --skip_attention and --skip_mlp would")
  path = pathlib.Path(FLAGS.skip)
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in ("skip_attention", "skip_mlp"):
      setattr(FLAGS, name, parse_integers(found[name]))
    k = parse_integers(found["k"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"--skip={path} has no skip_attention, skip_mlp and k, as choose_layers "
      f"writes them ({type(error).__name__}: {error})"
    ) from error
  if FLAGS.k is None:
    FLAGS.k = k
  if FLAGS.exit_threshold is None:
    FLAGS.exit_threshold = found.get("exit_threshold")


def check_flags() -> None:
  """Refuses what does not go together."""
  if (FLAGS.drafter == "layer_skip") != (skip() is not None):
    raise ValueError(
      "--drafter=layer_skip goes together with what it leaves out: --skip, or "
      "--skip_attention and --skip_mlp"
    )
  if FLAGS.exit_threshold is not None:
    if FLAGS.drafter != "layer_skip" or FLAGS.shape != "chain":
      raise ValueError("--exit_threshold is for chains of --drafter=layer_skip")
    if not 0 <= FLAGS.exit_threshold <= 1:
      raise ValueError(
        f"--exit_threshold={FLAGS.exit_threshold}; it must be in 0..1"
      )
    if not FLAGS.k:
      raise ValueError(
        "--exit_threshold says how much to draft, so does k=auto"
      )


def skip() -> Skip | None:
  """What --drafter=layer_skip leaves out; None: nothing was said of it."""
  said = FLAGS.skip_attention, FLAGS.skip_mlp
  if said == (None, None):
    return None
  return Skip(*(tuple(layers or ()) for layers in said))


def describe() -> str:
  """A few words: 'skips attention 1,4-6; MLP 2; threshold 0.8'."""
  parts = [
    f"{name} {spans(layers)}"
    for name, layers in zip(("attention", "MLP"), skip())
    if layers
  ]
  if FLAGS.exit_threshold is not None:
    parts.append(f"threshold {FLAGS.exit_threshold:g}")
  return "skips " + ("; ".join(parts) or "nothing")


def threshold() -> Threshold | None:
  """When layer skip stops drafting."""
  start = FLAGS.exit_threshold
  return None if start is None else Threshold(start)
