"""One point of a sweep: calibrated, counted, predicted and timed."""

import dataclasses
from pathlib import Path

import _calibration
import _decoding
import _flags
import _rows
from absl import flags
from absl.testing import flagsaver

from specdec.benchmark import calibrate, metrics, provenance, results, timing
from specdec.benchmark.session import Completed
from specdec.roofline import bounds, prediction
from specdec.utils import terminal

# What decides on models and prompts, and on a batch's plain loop.
_LOADED = (
  "target", "draft", "learned", "draft_ways", "dtype", "random_weights",
  "prompt_file", "chat", "seed",
)  # fmt: skip
_BASELINE = ("temperature", "top_k", "top_p", "max_new_tokens")
# Of a line, what a new prediction leaves as it is.
_MEASURED = (
  "load", "run", "rounds", "observed", "drafter", "caveats", "context", "date",
  "mesh",
)  # fmt: skip
_COUNTED = 3  # how often sampled texts are decoded to see how draft tokens fare
FLAGS = flags.FLAGS


def calibrated_tokens(rounds: dict) -> int:
  """New tokens of a calibrated text, by a sweep's `calibrate` and the flags."""
  return rounds["max_new_tokens"] or FLAGS.max_new_tokens // 2


class Bench:
  """What points share: models, prompts, plain loops, the calibration."""

  def __init__(self, folder: Path, rounds: dict, most: tuple[int, int]):
    self._path = folder / "calibration.json"
    self._rounds, self._most = rounds, most
    self._loaded: tuple | None = None
    self._baseline: dict = {}
    self.limit: timing.Limit | None = None  # of the loaded target
    self.calibration = _calibration.read(self._path)

  def models(self):
    """Those that the flags name; one pair at a time."""
    names = [FLAGS[name].value for name in _LOADED]
    if not (self._loaded and self._loaded[0] == names):
      self._loaded, self._baseline = None, {}
      models = _decoding.load(FLAGS.context + FLAGS.max_new_tokens)
      count = max(FLAGS.texts, *self._rounds["batch"])
      rows = _rows.make_rows(models.target, count, FLAGS.context)
      self._loaded = names, models, rows
      self.limit = timing.Limit(models.target.params)
    return self._loaded[1:]

  def calibrate(self, say) -> None:
    """Times passes and rounds of these flags where they are not known."""
    models, rows = self.models()
    ready = self.calibration and _calibration.knows(
      self.calibration, self._most[0], self._most[1] - 1
    )
    if not ready:
      batches, ks = self._rounds["batch"], self._rounds["k"]
      length = calibrated_tokens(self._rounds)
      context = FLAGS.context + FLAGS.max_new_tokens + max(ks) + 1
      with flagsaver.flagsaver(max_new_tokens=length):
        self.calibration = _calibration.timed(
          models,
          rows,
          FLAGS.context,
          batches,
          ks,
          context,
          self.calibration,
          FLAGS.calibration_repeats,
          self._most,
          say,
        )
      _calibration.write(self._path, self.calibration)
      timing.forget_programs()

  def session(self, k: int, batch: int):
    """Of these flags, with a plain loop that was compiled once."""
    models, _ = self.models()
    made = _decoding.make_session(models, k, batch, FLAGS.context, ())
    place = batch, *(FLAGS[name].value for name in _BASELINE)
    if place in self._baseline:
      made.share_baseline(self._baseline[place])
    made.compile(baseline=True)
    self._baseline[place] = made
    return made


class Point:
  """One point's session and texts: the flags say which."""

  def __init__(self, bench: Bench):
    self.k, self.batch = _flags.single("k"), _flags.single("batch")
    models, rows = bench.models()
    self._rows = rows[: FLAGS.texts]
    _decoding.check_memory(
      models.configs,
      FLAGS.context + FLAGS.max_new_tokens,
      places=models.places,
    )
    with terminal.progress(f"compiling batch {self.batch}, k = {self.k}"):
      self._session = bench.session(self.k, self.batch)
      self._session.warm_up(self._rows[: self.batch])
    self.slots = calibrate.slots_of(self._session, False)
    starts = range(0, len(self._rows), self.batch)
    self._batches = [range(i, i + self.batch) for i in starts]
    self._turns = -(-FLAGS.pairs // len(self._batches))

  def _decode(self, members, turn: int, baseline: bool) -> Completed:
    some = [self._rows[i] for i in members]
    numbers = [i + turn * len(self._rows) for i in members]
    return self._session.complete(some, numbers, baseline)

  def count(self) -> prediction.Observed:
    """How draft tokens fare, seen in other runs than those that are timed."""
    # What is timed has the numbers from 0 on. Greedy texts are what they are,
    # and of synthetic acceptance only the time is in question: there the very
    # numbers that are timed are run apart from the clock.
    if FLAGS.acceptance == "synthetic":
      turns = range(self._turns)
    elif FLAGS.temperature:
      turns = range(self._turns, self._turns + _COUNTED)
    else:
      turns = range(1)
    return prediction.observed(
      [
        [self._decode(some, turn, False).stats for some in self._batches]
        for turn in turns
      ]
    )

  def time(self) -> list[tuple[Completed, Completed]]:
    """(speculative, plain), who is first in turns too."""
    done = []
    for turn in range(self._turns):
      for number, some in enumerate(self._batches):
        order = (False, True) if (turn + number) % 2 == 0 else (True, False)
        pieces = {
          baseline: self._decode(some, turn, baseline) for baseline in order
        }
        done.append((pieces[False], pieces[True]))
    return done

  def run(self, done: list[tuple[Completed, Completed]]) -> results.Run:
    """What it amounted to."""
    # Greedy turns decode the same texts again.
    distinct = len(done) if FLAGS.temperature else len(self._batches)
    return results.Run(
      "all",
      self.k,
      self._session.drafter.spec.max_nodes,
      self.batch,
      metrics.acceptance([one.stats for one, _ in done[:distinct]]),
      timing.speed(done),
      None,
    )


def measured(bench: Bench, say, known: dict | None = None) -> dict:
  """A point's line.

  Args:
    known: a line whose times are kept.
  """
  bench.calibrate(say)
  if known:
    line = {name: known[name] for name in _MEASURED}
  else:
    say("compiling")
    point = Point(bench)
    say("counting")
    found = point.count()
    say("timing")
    load = provenance.load()
    done, slots = point.time(), point.slots
    run = point.run(done)
    warnings = check(bench, run, done)
    del point
    timing.forget_programs()
    line = {
      "load": load,
      "run": run.document(),
      "rounds": sum(int(ours.stats.widths.sum()) for ours, _ in done),
      "observed": dataclasses.asdict(found),
      "drafter": _decoding.describe_drafter(),
      "caveats": [*_decoding.caveats(), *warnings],
      "context": slots,
      "date": provenance.now(),
      "mesh": FLAGS.mesh,
    }
  said = prediction.predict(
    _calibration.pair_of(bench.models()[0], bench.calibration),
    prediction.Observed(**line["observed"]),
    FLAGS.texts,
    _flags.single("batch"),
    line["context"],
    FLAGS.max_new_tokens,
  )
  return line | {"prediction": dataclasses.asdict(said)}


def check(bench: Bench, run, done) -> list[str]:
  """Returns a sentence for every time that this machine's bandwidth forbids."""
  models, _ = bench.models()
  found = []
  for who, baseline in ((0, False), (1, True)):
    rounds = sum(int(pieces[who].stats.widths.sum()) for pieces in done)
    seconds = sum(pieces[who].seconds for pieces in done) / rounds
    size = bounds.pass_bytes(models.target.config, run.batch, 1, FLAGS.context)
    what = "a plain round" if baseline else f"a round of k = {run.k}"
    found.append(bench.limit.check(what, seconds, size))
  return [sentence for sentence in found if sentence]
