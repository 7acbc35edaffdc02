"""Runs a sweep: each point calibrated, counted, predicted and timed.

A point is a dict of fields of a Setup, and of `prompt_file` and `chat`, that
differ from point to point.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from specdec import multihost
from specdec.benchmark import (
  calibrated,
  deployments,
  prompts,
  provenance,
  rows,
  runs,
  timing,
)
from specdec.benchmark.batches import Batch, batches_of
from specdec.benchmark.comparison import Bench
from specdec.benchmark.settings import checksums_of
from specdec.benchmark.setup import Setup
from specdec.roofline import prediction
from specdec.roofline.cost import pass_bound
from specdec.utils import files, terminal
from specdec.utils.spelling import choices

_OF_TEXTS = ("prompt_file", "chat")
_OF_MACHINES = ("mesh", "prompt_size")  # of the whole sweep
_ACCEPTED = [
  field.name
  for field in dataclasses.fields(Setup)
  if field.name not in _OF_MACHINES
] + [*_OF_TEXTS]
_PARTS = ("points", "common", "calibrate", "whole")
_READINGS = 3  # of the bandwidth, before a point and after it
_COUNTED = 3  # how often sampled texts are decoded to see how draft tokens fare
Report = Callable[[str], None]


class Rounds(NamedTuple):
  """A sweep's `calibrate`: the rounds that the cost model is fitted to."""

  batch: tuple[int, ...] = (1, 3)
  k: tuple[int, ...] = (2, 5)
  max_new_tokens: int | None = None  # of their texts; default half the points'

  def length(self, setup: Setup) -> int:
    """Returns the new tokens of a calibrated text."""
    return self.max_new_tokens or setup.max_new_tokens // 2


class Lengths(NamedTuple):
  """A sweep's `whole`: the sizes of what is timed."""

  context: int = 64  # tokens of every prompt
  texts: int = 16
  pairs: int = 12
  calibration_repeats: int = 21


class Point(NamedTuple):
  """A point as it is written down, and what it means."""

  settings: dict[str, Any]
  setup: Setup
  prompt_files: tuple[str, ...]
  chat: bool
  # Of its files, such as a user's drafter and the texts, as they were when it
  # was read: an edit while the sweep runs is for the next run.
  checksums: dict[str, int]

  @property
  def key(self) -> str:
    """What its line is recognised by in lines.jsonl."""
    return _key(self.settings, self.checksums)


def _key(settings: dict[str, Any], checksums: dict[str, int]) -> str:
  """A point whose files, such as a user's drafter, were edited is another."""
  whole = [settings, checksums] if checksums else settings
  return json.dumps(whole, sort_keys=True)


def _settings(values, source: str, accepted: Sequence[str]) -> dict:
  """Checks one dict of a sweep."""
  if not isinstance(values, Mapping):
    raise ValueError(f"{source} is {values!r:.60}; it must be a dict")
  for name in values:
    if name not in accepted:
      raise ValueError(f"{source} sets {name!r}; {choices(name, accepted)}")
  return dict(values)


def points_of(sweep: Mapping, **machine) -> list[Point]:
  """Returns every point of a sweep, whole; `machine` is what is the same for
  all, `mesh` and `prompt_size`."""
  _settings(sweep, "the sweep", _PARTS)
  common = _settings(sweep.get("common", {}), "the sweep's common", _ACCEPTED)
  points = sweep.get("points", ())
  if not isinstance(points, list | tuple) or not points:
    raise ValueError("the sweep's get_config() has no points, a list of dicts")
  whole = {}
  for number, settings in enumerate(points):
    source = f"the sweep's points[{number}]"
    settings = common | _settings(settings, source, _ACCEPTED)
    try:
      point = _point(settings, machine)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{source}: {error}") from error
    if whole.setdefault(point.key, point) is not point:
      raise ValueError(f"the sweep has this point twice: {point.key}")
  return [*whole.values()]


def _point(settings: dict[str, Any], machine: dict[str, Any]) -> Point:
  fields = {n: x for n, x in settings.items() if n not in _OF_TEXTS}
  setup = Setup(**fields, **machine)
  # 1 and 1.0 are one setting.
  settings |= {name: getattr(setup, name) for name in fields}
  paths = settings.get("prompt_file") or ()
  paths = (paths,) if isinstance(paths, str) else tuple(paths)
  if not all(isinstance(path, str) for path in paths):
    raise ValueError(f"prompt_file = {paths}; it must be texts")
  for path in paths:
    prompts.scan(path)
  chat = settings.get("chat", False)
  if not isinstance(chat, bool):
    raise ValueError(f"chat = {chat!r}; it must be a bool")
  if chat and not paths:
    raise ValueError("chat is for prompt_file")
  checksums = setup.checksums() | checksums_of(paths)
  return Point(settings, setup, paths, chat, checksums)


def numbers_of(sweep: Mapping, part: str, kind: type) -> dict[str, Any]:
  """Returns what a part of a sweep sets: integers, or tuples of integers, of
  the fields of `kind`, a NamedTuple with defaults."""
  source = f"the sweep's {part}"
  values = _settings(sweep.get(part, {}), source, kind._fields)
  for name, value in values.items():
    default = kind._field_defaults[name]
    if value is None and default is None:
      continue
    several = isinstance(default, tuple)
    listed = several and isinstance(value, list | tuple)
    numbers = tuple(value) if listed else (value,)
    if not numbers or any(type(x) is not int or x < 1 for x in numbers):
      accepted = "integers" if several else "an integer"
      raise ValueError(
        f"{source} sets {name} = {value!r:.60}; it must be {accepted} >= 1"
      )
    values[name] = numbers if several else value
  return values


def check(point: Point, rounds: Rounds, lengths: Lengths) -> None:
  """Refuses a point that cannot be calibrated apart from what it measures."""
  setup = point.setup
  calibrated.check(setup)
  setup.check_sources()
  length = rounds.length(setup)
  if length <= max(rounds.k):
    raise ValueError(
      f"calibrated texts of {length} new tokens have no room for a round "
      f"of k = {max(rounds.k)}"
    )
  again = setup.batch in rounds.batch and setup.levels in rounds.k
  if again and length == setup.max_new_tokens:
    raise ValueError(
      f"batch {setup.batch} with k = {setup.levels} is evaluated and is among "
      "the rounds to calibrate with; take others, or texts of another length"
    )
  if lengths.texts % setup.batch:
    raise ValueError(
      f"--texts={lengths.texts} is no multiple of the batch {setup.batch}"
    )


class SweepBench:
  """What points share: a loaded target with its prompts, a calibration."""

  def __init__(
    self, path: Path, points: Sequence[Point], rounds: Rounds, lengths: Lengths
  ):
    """Reads the calibration at `path`, which it adds to."""
    self._path, self._rounds, self._lengths = path, rounds, lengths
    self._most_batch = max([*rounds.batch, *(p.setup.batch for p in points)])
    self._most_k = max([*rounds.k, *(p.setup.levels for p in points)])
    self._setups = [point.setup for point in points]
    self._loaded: tuple[tuple, Bench, timing.Limit, Callable] | None = None
    self._calibration = calibrated.read(path)

  def _load(
    self, point: Point
  ) -> tuple[Bench, timing.Limit, Callable[[], float]]:
    """Returns target and prompts of a point, and what limits it and reads the
    bandwidth; loads one target at a time."""
    setup, lengths = point.setup, self._lengths
    parts = setup.seed, point.prompt_files, point.chat, setup.identity
    if not (self._loaded and self._loaded[0] == parts):
      self._loaded = None
      others = [x for x in self._setups if x.identity == setup.identity]
      target = setup.load_target(others=others)
      source = rows.Source(target.checkpoint, *parts[1:3], setup.seed)
      count = max(lengths.texts, *self._rounds.batch)
      encoded = rows.make_rows(source, count, lengths.context)
      limit = timing.Limit(target.checkpoint.params)
      read = timing.bandwidth_timer(target.checkpoint.params)
      self._loaded = parts, Bench(target, encoded), limit, read
    return self._loaded[1:]

  def _calibrate(self, setup: Setup, bench: Bench, report: Report) -> None:
    """Times passes and rounds of this setup where there are none yet."""
    base, rounds, target = self._calibration, self._rounds, bench.target
    most = self._most_batch, self._most_k
    if base and calibrated.covers(setup, target, base, *most):
      return
    length = setup.max_length(target.checkpoint.config)
    self._calibration = calibrated.timed(
      dataclasses.replace(setup, max_new_tokens=rounds.length(setup)),
      target,
      bench.encoded,
      rounds.batch,
      rounds.k,
      length + max(rounds.k) + 1,
      base,
      self._lengths.calibration_repeats,
      (most[0], most[1] + 1),
      report,
    )
    calibrated.write(self._path, self._calibration)
    timing.forget_programs()

  def measure(
    self, point: Point, report: Report, line: dict | None = None
  ) -> dict:
    """Returns a point's line: measured, unless an earlier one is given, and
    predicted."""
    setup, (bench, limit, read) = point.setup, self._load(point)
    self._calibrate(setup, bench, report)
    if line is None:
      line = self._time(setup, bench, limit, read, report)
      timing.forget_programs()
    predicted = prediction.predict(
      deployments.pair_of(
        setup, bench.target, self._calibration, line.get("bandwidth")
      ),
      prediction.Observed(**line["observed"]),
      self._lengths.texts,
      setup.batch,
      line["context"],
      setup.max_new_tokens,
    )
    return line | {"prediction": dataclasses.asdict(predicted)}

  def _time(
    self,
    setup: Setup,
    bench: Bench,
    limit: timing.Limit,
    read: Callable[[], float],
    report: Report,
  ) -> dict:
    report("compiling")
    texts = self._lengths.texts
    batches = batches_of(bench.encoded[:texts], setup.batch)
    repeats = -(-self._lengths.pairs // len(batches))
    what = f"batch {setup.batch}, k = {setup.levels}"
    ways = bench.ways(setup, batches[0].rows, what)
    decoder = ways[runs.OURS]
    rates = [read() for _ in range(_READINGS)]
    report("counting")
    observed = self._count(setup, decoder, batches, repeats)
    report("timing")
    load = provenance.load()
    comparison = runs.compare(ways, batches, repeats, renumber=texts)
    rates += [read() for _ in range(_READINGS)]
    run = comparison.run(runs.OURS, setup.k)
    # Of each way no round may be faster than the bandwidth allows.
    config, warnings = bench.target.checkpoint.config, []
    size = pass_bound(config, run.batch, 1, self._lengths.context).bytes
    rounds = {}
    for name, what in (
      (runs.OURS, f"a round of k = {run.k}"),
      (runs.BASELINE, "a baseline round"),
    ):
      completed = comparison.of(name)
      rounds[name] = sum(one.num_rounds for one in completed)
      seconds = sum(one.seconds for one in completed) / rounds[name]
      warnings.append(limit.check(what, seconds, size))
    return {
      "load": load,
      "bandwidth": float(multihost.agree(float(np.median(rates)))),
      "run": run.document(),
      "rounds": rounds[runs.OURS],
      "observed": dataclasses.asdict(observed),
      "drafter": setup.description,
      "caveats": [*setup.caveats, *filter(None, warnings)],
      "context": decoder.num_slots,
      "date": provenance.now(),
      "mesh": setup.mesh,
    }

  def _count(
    self, setup: Setup, decoder, batches, repeats: int
  ) -> prediction.Observed:
    """Counts accepted tokens in other runs than those that are timed."""
    # What is timed has the numbers from 0 on. Greedy texts are what they are,
    # and of synthetic acceptance only the time is in question: there the very
    # numbers that are timed are run apart from the clock.
    first, count = 0, 1
    if setup.make_rule().name == "synthetic":
      count = repeats
    elif setup.temperature:
      first, count = repeats, _COUNTED
    stats, texts = [], self._lengths.texts
    for turn in range(first, first + count):
      stats.append([])
      for rows_of_one, numbers in batches:
        batch = Batch(rows_of_one, [n + turn * texts for n in numbers])
        stats[-1].append(decoder.complete(batch).stats)
    return prediction.observed(stats)


def measure_all(
  bench: SweepBench,
  points: Sequence[Point],
  lines: files.Lines,
  retry: bool = False,
  repredict: bool = False,
  finished: Callable[[dict], object] = lambda line: None,
) -> list[dict]:
  """Measures points that `lines` does not hold yet, and adds their lines;
  returns the line of each point that has one.

  A point that fails is written down, and the others are measured.

  Args:
    retry: tries points again that failed before.
    repredict: predicts those again that are measured, and no others.
    finished: called with each line that is added.
  """

  def key(line: dict) -> str:
    return _key(line["point"], line.get("file_checksums", {}))

  entries = [line for line in lines.entries if "point" in line]
  done = {key(line): line for line in entries if "run" in line}
  failed = {key(line) for line in entries if "error" in line}
  if repredict:
    left = [point for point in points if point.key in done]
  else:
    skipped = {*done} | (set() if retry else failed)
    left = [point for point in points if point.key not in skipped]
  count = len(points)
  with tqdm(total=count, initial=count - len(left), unit="point") as progress:
    for point in left:
      sums = point.checksums
      files_of = {"file_checksums": sums} if sums else {}
      try:
        line = bench.measure(
          point, progress.set_postfix_str, done.get(point.key)
        )
      except Exception as error:  # the others must not suffer
        line = {"error": f"{type(error).__name__}: {error}"}
        name = " ".join(f"{key}={x}" for key, x in point.settings.items())
        text = terminal.escape(f"failed: {name}: {error}")
        tqdm.write(text, file=sys.stderr)
      lines.append({"point": point.settings, **files_of, **line})
      finished(lines.entries[-1])
      progress.update()
  keys = {point.key for point in points}
  latest = {key(line): line for line in lines.entries if "run" in line}
  return [line for name, line in latest.items() if name in keys]
