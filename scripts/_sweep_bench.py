"""One point of a sweep: calibrated, counted, predicted and timed."""

import dataclasses
from pathlib import Path

import _calibration
import _decoding
import _flags
import _rows
from absl import flags
from absl.testing import flagsaver

from specdec.benchmark import provenance, runs, timing
from specdec.benchmark.decoder import Batch, batches_of
from specdec.roofline import prediction
from specdec.roofline.cost import pass_bound
from specdec.utils import terminal

# What decides on models and prompts, and on a batch's baseline.
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
_OURS = "speculative"
FLAGS = flags.FLAGS


def calibrated_tokens(rounds: dict) -> int:
  """New tokens of a calibrated text, by a sweep's `calibrate` and the flags."""
  return rounds["max_new_tokens"] or FLAGS.max_new_tokens // 2


class Bench:
  """What points share: models, prompts, baselines, the calibration."""

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

  def decoders(self, k: int, batch: int):
    """Those of these flags; the baseline of a batch is compiled once."""
    models, _ = self.models()
    decoder = _decoding.make_decoder(models, k, batch, FLAGS.context, ())
    place = batch, *(FLAGS[name].value for name in _BASELINE)
    if place not in self._baseline:
      self._baseline[place] = decoder.baseline()
    return {_OURS: decoder, runs.BASELINE: self._baseline[place]}


class Point:
  """One point's decoders and texts: the flags say which."""

  def __init__(self, bench: Bench):
    self.k, self.batch = _flags.single("k"), _flags.single("batch")
    models, rows = bench.models()
    self._texts = FLAGS.texts
    self._batches = batches_of(rows[: FLAGS.texts], self.batch)
    _decoding.check_memory(
      models.configs,
      FLAGS.context + FLAGS.max_new_tokens,
      places=models.places,
    )
    with terminal.progress(f"compiling batch {self.batch}, k = {self.k}"):
      self._decoders = bench.decoders(self.k, self.batch)
      for decoder in self._decoders.values():
        decoder.warm_up(self._batches[0].rows)
    self.slots = self._decoders[_OURS].num_slots
    self._repeats = -(-FLAGS.pairs // len(self._batches))

  def count(self) -> prediction.Observed:
    """Counts accepted tokens in other runs than those that are timed."""
    # What is timed has the numbers from 0 on. Greedy texts are what they are,
    # and of synthetic acceptance only the time is in question: there the very
    # numbers that are timed are run apart from the clock.
    if FLAGS.acceptance == "synthetic":
      repeats = range(self._repeats)
    elif FLAGS.temperature:
      repeats = range(self._repeats, self._repeats + _COUNTED)
    else:
      repeats = range(1)
    decoder = self._decoders[_OURS]
    return prediction.observed(
      [
        [
          decoder.complete(
            Batch(rows, [n + repeat * self._texts for n in numbers])
          ).stats
          for rows, numbers in self._batches
        ]
        for repeat in repeats
      ]
    )

  def time(self) -> runs.Comparison:
    """Times all texts in both ways, with other noise in every repeat."""
    return runs.compare(
      self._decoders, self._batches, self._repeats, renumber=self._texts
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
    comparison, slots = point.time(), point.slots
    run = comparison.run(_OURS, point.k)
    warnings = check(bench, run, comparison)
    del point
    timing.forget_programs()
    line = {
      "load": load,
      "run": run.document(),
      "rounds": sum(one.num_rounds for one in comparison.of(_OURS)),
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


def check(bench: Bench, run, comparison: runs.Comparison) -> list[str]:
  """Returns a sentence for every time that this machine's bandwidth forbids."""
  models, _ = bench.models()
  warnings = []
  for name in comparison.decoders:
    completed = comparison.of(name)
    rounds = sum(one.num_rounds for one in completed)
    seconds = sum(one.seconds for one in completed) / rounds
    size = pass_bound(models.target.config, run.batch, 1, FLAGS.context).bytes
    what = f"a round of k = {run.k}" if name == _OURS else "a baseline round"
    warnings.append(bench.limit.check(what, seconds, size))
  return [sentence for sentence in warnings if sentence]
