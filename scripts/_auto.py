"""--k=auto: the k that pays, from costs and from how the first draft tokens
fare.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import _calibration
import _decoding
import _main
from absl import flags

from specdec import multihost
from specdec.benchmark.decoder import prompt_size
from specdec.roofline import hardware, prediction, theory
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import terminal
from specdec.utils.terminal import columns

_BEFORE = set(flags.FLAGS)
flags.DEFINE_integer("most_k", 8, "With --k=auto: the largest that is tried.")
flags.DEFINE_string(
  "calibration",
  None,
  "With --k=auto: file of bench.py --calibrate; what it lacks is timed first, "
  "and kept. Default: one for each machine, in ~/.cache/specdec/calibration.",
)
flags.DEFINE_bool(
  "explain", False, "With --k=auto: say what rounds cost, term by term."
)
FLAGS = flags.FLAGS
OWN = sorted(set(FLAGS) - _BEFORE)
_ROUNDS = 16  # from which acceptance is learnt


class Choice(NamedTuple):
  """A k, and what is expected of it."""

  k: int
  speedup: float
  lines: list[list[str]]  # k, tokens a round, ms a round, tokens/s, speedup
  prefix_acceptance: tuple[float, ...]
  pair: TargetDraftPair
  context: int


def check_flags() -> None:
  """Refuses what cannot work."""
  if not 1 <= FLAGS.most_k < FLAGS.max_new_tokens:
    raise ValueError(
      f"--most_k={FLAGS.most_k}; it must be >= 1 and leave room in "
      f"--max_new_tokens={FLAGS.max_new_tokens}"
    )
  if FLAGS.shape != "chain":
    raise ValueError(f"--k=auto is for chains, not --shape={FLAGS.shape}")
  if FLAGS.calibration:
    _main.check_writable("--calibration", FLAGS.calibration)


def choose(models, rows: Sequence[Sequence[int]], batch: int) -> Choice:
  """The k <= --most_k, 0 included, that should decode these rows fastest.

  Args:
    rows: prompts, one batch of them.
  """
  found = _calibrated(models, rows, batch)
  pair = _calibration.pair_of(models, found)
  size = prompt_size(rows)
  decoder = _decoding.make_decoder(
    models, FLAGS.most_k, batch, size, (), pilot=True
  )
  slots = decoder.num_slots
  what = f"compiling k = {FLAGS.most_k} and trying it for {_ROUNDS} rounds"
  with terminal.progress(what):
    seen = prediction.observed([[decoder.first_rounds(rows, _ROUNDS)]])
  baseline = pair.baseline(batch, slots).seconds
  best, gain, lines = 0, 1.0, []
  for k in range(FLAGS.most_k + 1):
    prefix_acceptance = seen.prefix_acceptance[:k]
    tokens = theory.expected_tokens(prefix_acceptance)
    seconds = baseline
    if k:
      seconds = prediction.mean_round(pair, batch, k, slots, seen.wide)
    faster = tokens * baseline / seconds
    if faster > gain:
      best, gain = k, faster
    rate = batch * tokens / seconds
    lines.append(
      [str(k), f"{tokens:.2f}", f"{1e3 * seconds:.2f}", f"{rate:.1f}"]
      + [f"{faster:.2f}"]
    )
  best, gain = map(float, multihost.agree([best, gain]))
  return Choice(int(best), gain, lines, seen.prefix_acceptance, pair, slots)


def _calibrated(models, rows, batch):
  """A calibration that knows these models and this setting."""
  path = Path(FLAGS.calibration or _usual())
  base = _calibration.read(path)
  most = batch, FLAGS.most_k
  if base and _calibration.knows(base, *most):
    return base
  many = list(rows) * batch
  with terminal.progress(f"timing this machine for --k=auto (kept in {path})"):
    found = _calibration.timed(
      models,
      many[:batch],
      prompt_size(rows),
      (batch,),
      sorted({1, FLAGS.most_k}),
      prompt_size(rows) + FLAGS.max_new_tokens,
      base,
      say=lambda _: None,
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  _calibration.write(path, found)
  return found


def _usual() -> Path:
  folder = Path("~/.cache/specdec/calibration").expanduser()
  return folder / f"{hardware.fingerprint()}.json"


def explain(choice: Choice, batch: int) -> str:
  """The reasoning: a line, and with --explain the tables behind it."""
  shown = " ".join(f"{share:.2f}" for share in choice.prefix_acceptance) or "-"
  if choice.k:
    said = (
      f"k = {choice.k}, {choice.speedup:.2f} times autoregressive decoding "
      "expected"
    )
    if batch > 1:
      said += " while all rows are at work"
  else:
    said = "k = 0: no draft token pays here, so this decodes autoregressively"
  text = f"{said} (batch {batch}; first rounds kept {shown})"
  if not FLAGS.explain:
    return text
  header = ["k", "tokens a round", "ms a round", "tokens/s", "speedup"]
  text += "\n\n" + columns(header, choice.lines)
  header = ["part", "times", "term", "MB", "GFLOP", "MB sent", "ms"]
  for k in sorted({0, choice.k or 1}):
    lines = prediction.explain(choice.pair.round(batch, k, choice.context))
    text += f"\n\na round of k = {k}, {choice.context} slots of cache\n"
    text += columns(header, lines)
  return text
