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

from tqdm import tqdm

from specdec.benchmark import (
  calibrated,
  prompts,
  provenance,
  rows,
  runs,
  timing,
)
from specdec.benchmark.catalog import Target
from specdec.benchmark.decoder import Batch, batches_of
from specdec.benchmark.setup import Setup
from specdec.roofline import prediction
from specdec.roofline.cost import pass_bound
from specdec.utils import files, terminal
from specdec.utils.spelling import choices

_FIELDS = [field.name for field in dataclasses.fields(Setup)]
_OF_TEXTS = ("prompt_file", "chat")
_OF_MACHINES = ("mesh", "prompt_size")  # of the whole sweep
ACCEPTED = [x for x in [*_FIELDS, *_OF_TEXTS] if x not in _OF_MACHINES]
_PARTS = ("points", "common", "calibrate", "whole")
# What decides on the loaded target and the prompts, and on a batch's baseline.
_LOADED = ("seed",)
_BASELINE = ("batch", "temperature", "top_k", "top_p", "max_new_tokens")
# Of a line, what a new prediction leaves as it is.
_MEASURED = (
  "load", "run", "rounds", "observed", "drafter", "caveats", "context", "date",
  "mesh",
)  # fmt: skip
_COUNTED = 3  # how often sampled texts are decoded to see how draft tokens fare


class Rounds(NamedTuple):
  """The rounds that the cost model is fitted to, and their texts' length."""

  batch: tuple[int, ...] = (1, 3)
  k: tuple[int, ...] = (2, 5)
  max_new_tokens: int | None = None  # default half the points'

  def length(self, setup: Setup) -> int:
    """Returns the new tokens of a calibrated text."""
    return self.max_new_tokens or setup.max_new_tokens // 2


class Lengths(NamedTuple):
  """What all points share: the sizes of what is timed."""

  context: int = 64  # tokens of every prompt
  texts: int = 16
  pairs: int = 12
  calibration_repeats: int = 21


def _numbers(name: str, value) -> tuple[int, ...]:
  """Returns one integer or several as a tuple."""
  numbers = (value,) if isinstance(value, int) else value
  if not isinstance(numbers, list | tuple) or not numbers:
    numbers = ()
  if not all(isinstance(x, int) and x >= 1 for x in numbers) or not numbers:
    raise ValueError(
      f"the sweep's calibrate sets {name} = {value!r:.60}; it must be "
      "integers >= 1"
    )
  return tuple(numbers)


class Point(NamedTuple):
  """A point as it is written down, and what it means."""

  settings: dict[str, Any]
  setup: Setup
  prompt_files: tuple[str, ...]
  chat: bool

  @property
  def key(self) -> str:
    """Its key in lines.jsonl."""
    return json.dumps(self.settings, sort_keys=True)

  @property
  def name(self) -> str:
    """Its settings, for a message."""
    return " ".join(f"{key}={value}" for key, value in self.settings.items())


def _settings(values, source: str, accepted: Sequence[str]) -> dict:
  """Checks one dict of a sweep."""
  if not isinstance(values, Mapping):
    raise ValueError(f"{source} is {values!r:.60}; it must be a dict")
  for name in values:
    if name not in accepted:
      raise ValueError(f"{source} sets {name!r}; {choices(name, accepted)}")
  return dict(values)


def points_of(sweep: Mapping, mesh: str | None = None) -> list[Point]:
  """Returns every point of a sweep, whole.

  Raises:
    ValueError: there is none, one sets what it may not, or two are the same.
  """
  for name in sweep:
    if name not in _PARTS:
      raise ValueError(f"the sweep sets {name!r}; {choices(name, _PARTS)}")
  common = _settings(sweep.get("common", {}), "the sweep's common", ACCEPTED)
  points = sweep.get("points", ())
  if not isinstance(points, list | tuple) or not points:
    raise ValueError("the sweep's get_config() has no points, a list of dicts")
  whole = []
  for number, point in enumerate(points):
    source = f"the sweep's points[{number}]"
    settings = common | _settings(point, source, ACCEPTED)
    fields = {n: x for n, x in settings.items() if n not in _OF_TEXTS}
    try:
      setup = Setup(**fields, mesh=mesh)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{source}: {error}") from error
    # 1 and 1.0 are one setting.
    settings |= {name: getattr(setup, name) for name in fields}
    paths = settings.get("prompt_file", ())
    paths = (paths,) if isinstance(paths, str) else tuple(paths or ())
    if not all(isinstance(path, str) for path in paths):
      raise ValueError(f"{source}: prompt_file = {paths}; it must be texts")
    for path in paths:
      prompts.scan(path)
    chat = settings.get("chat", False)
    if not isinstance(chat, bool):
      raise ValueError(f"{source}: chat = {chat!r}; it must be a bool")
    if chat and not paths:
      raise ValueError(f"{source}: chat is for prompt_file")
    whole.append(Point(settings, setup, paths, chat))
  keys = [point.key for point in whole]
  for key in keys:
    if keys.count(key) > 1:
      raise ValueError(f"the sweep has this point twice: {key}")
  return whole


def rounds_of(sweep: Mapping) -> Rounds:
  """Returns the rounds to calibrate with.

  Raises:
    ValueError: they are none.
  """
  part = sweep.get("calibrate", {})
  values = _settings(part, "the sweep's calibrate", Rounds._fields)
  for name in ("batch", "k"):
    if name in values:
      values[name] = _numbers(name, values[name])
  if type(values.get("max_new_tokens")) not in (int, type(None)):
    raise ValueError(
      "the sweep's calibrate sets max_new_tokens = "
      f"{values['max_new_tokens']!r:.60}; it must be an integer"
    )
  return Rounds(**values)


def whole_of(sweep: Mapping) -> dict[str, int]:
  """Returns the lengths that a sweep asks for."""
  part = sweep.get("whole", {})
  values = _settings(part, "the sweep's whole", Lengths._fields)
  for name, value in values.items():
    if type(value) is not int or value < 1:
      raise ValueError(
        f"the sweep's whole sets {name} = {value!r:.60}; it must be an integer "
        ">= 1"
      )
  return values


def check(point: Point, rounds: Rounds, lengths: Lengths) -> None:
  """Refuses a point that cannot be calibrated apart from what it measures.

  Raises:
    ValueError: says why.
  """
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


class Bench:
  """What points share: the loaded target, prompts, baselines, a calibration."""

  def __init__(
    self, path: Path, points: Sequence[Point], rounds: Rounds, lengths: Lengths
  ):
    """Reads the calibration at `path`, which it adds to."""
    self._path, self._rounds, self._lengths = path, rounds, lengths
    batch = max([*rounds.batch, *(point.setup.batch for point in points)])
    k = max([*rounds.k, *(point.setup.levels for point in points)])
    self._most = batch, k
    self._setups = [
      dataclasses.replace(point.setup, prompt_size=lengths.context)
      for point in points
    ]
    self._loaded: tuple[tuple, Target, list[list[int]]] | None = None
    self._baselines: dict[tuple, Any] = {}
    self._limit: timing.Limit | None = None
    self.calibration = calibrated.read(path)

  def _load(self, point: Point) -> tuple[Setup, Target, list[list[int]]]:
    """Returns the setup of a point's prompts; loads one target at a time."""
    setup, lengths = point.setup, self._lengths
    setup = dataclasses.replace(setup, prompt_size=lengths.context)
    parts = tuple(getattr(setup, name) for name in _LOADED)
    parts += (point.prompt_files, point.chat, setup.identity)
    if not (self._loaded and self._loaded[0] == parts):
      self._loaded, self._baselines = None, {}
      others = [x for x in self._setups if x.identity == setup.identity]
      target = setup.load_target(others=others)
      source = rows.Source(
        target.checkpoint, point.prompt_files, point.chat, setup.seed
      )
      count = max(lengths.texts, *self._rounds.batch)
      prompts = rows.make_rows(source, count, lengths.context)
      self._loaded = parts, target, prompts
      self._limit = timing.Limit(target.checkpoint.params)
    return setup, *self._loaded[1:]

  def _calibrate(self, point: Point, report: Callable[[str], None]) -> None:
    """Times passes and rounds of this setup where they are not known."""
    setup, target, prompts = self._load(point)
    base, rounds = self.calibration, self._rounds
    if base and calibrated.covers(setup, target, base, *self._most):
      return
    length = setup.prompt_size + setup.max_new_tokens
    self.calibration = calibrated.timed(
      dataclasses.replace(setup, max_new_tokens=rounds.length(setup)),
      target,
      prompts,
      rounds.batch,
      rounds.k,
      length + max(rounds.k) + 1,
      base,
      self._lengths.calibration_repeats,
      (self._most[0], self._most[1] + 1),
      report,
    )
    calibrated.write(self._path, self.calibration)
    timing.forget_programs()

  def measure(
    self,
    point: Point,
    report: Callable[[str], None],
    line: dict | None = None,
  ) -> dict:
    """Returns a point's line: measured, and predicted.

    Args:
      line: an earlier line, whose times are kept.
    """
    self._calibrate(point, report)
    setup, target, prompts = self._load(point)
    if line:
      line = {name: line[name] for name in _MEASURED}
    else:
      line = self._time(setup, target, prompts, report)
    predicted = prediction.predict(
      calibrated.pair_of(setup, target, self.calibration),
      prediction.Observed(**line["observed"]),
      self._lengths.texts,
      setup.batch,
      line["context"],
      setup.max_new_tokens,
    )
    return line | {"prediction": dataclasses.asdict(predicted)}

  def _time(self, setup, target, prompts, report) -> dict:
    report("compiling")
    decoder = dataclasses.replace(setup.decoder(target), eos_ids=())
    setup.check_memory(target, decoder)
    place = tuple(getattr(setup, name) for name in _BASELINE)
    baseline = self._baselines.setdefault(place, decoder.baseline())
    batches = batches_of(prompts[: self._lengths.texts], setup.batch)
    repeats = -(-self._lengths.pairs // len(batches))
    decoders = {runs.OURS: decoder, runs.BASELINE: baseline}
    what = f"compiling batch {setup.batch}, k = {setup.levels}"
    with terminal.progress(what):
      for one in decoders.values():
        if not one.is_warm:
          one.warm_up(batches[0].rows)
    report("counting")
    observed = self._count(setup, decoder, batches, repeats)
    report("timing")
    load = provenance.load()
    comparison = runs.compare(
      decoders, batches, repeats, renumber=self._lengths.texts
    )
    run = comparison.run(runs.OURS, setup.k)
    line = {
      "load": load,
      "run": run.document(),
      "rounds": sum(one.num_rounds for one in comparison.of(runs.OURS)),
      "observed": dataclasses.asdict(observed),
      "drafter": setup.description,
      "caveats": [*setup.caveats, *self._impossible(target, comparison, run)],
      "context": decoder.num_slots,
      "date": provenance.now(),
      "mesh": setup.mesh,
    }
    del decoder, decoders, comparison
    timing.forget_programs()
    return line

  def _count(
    self, setup: Setup, decoder, batches, repeats: int
  ) -> prediction.Observed:
    """Counts accepted tokens in other runs than those that are timed."""
    # What is timed has the numbers from 0 on. Greedy texts are what they are,
    # and of synthetic acceptance only the time is in question: there the very
    # numbers that are timed are run apart from the clock.
    if setup.make_rule().name == "synthetic":
      turns = range(repeats)
    elif setup.temperature:
      turns = range(repeats, repeats + _COUNTED)
    else:
      turns = range(1)
    texts = self._lengths.texts
    renumbered = [
      [Batch(b.rows, [n + turn * texts for n in b.numbers]) for b in batches]
      for turn in turns
    ]
    return prediction.observed(
      [[decoder.complete(batch).stats for batch in some] for some in renumbered]
    )

  def _impossible(self, target, comparison, run) -> list[str]:
    """Returns a sentence for every time that the bandwidth forbids."""
    config, warnings = target.checkpoint.config, []
    size = pass_bound(config, run.batch, 1, self._lengths.context).bytes
    for name in comparison.decoders:
      completed = comparison.of(name)
      rounds = sum(one.num_rounds for one in completed)
      seconds = sum(one.seconds for one in completed) / rounds
      what = (
        f"a round of k = {run.k}" if name == runs.OURS else "a baseline round"
      )
      warnings.append(self._limit.check(what, seconds, size))
    return [sentence for sentence in warnings if sentence]


def measure_all(
  bench: Bench,
  points: Sequence[Point],
  lines: files.Lines,
  retry: bool = False,
  repredict: bool = False,
) -> list[dict]:
  """Measures points that `lines` does not hold yet, and adds their lines.

  A point that fails is written down, and the others are measured.

  Args:
    retry: tries points again that failed before.
    repredict: predicts those again that are measured, and no others.

  Returns:
    The line of each point that has one.
  """

  def key(line: dict) -> str:
    return json.dumps(line["point"], sort_keys=True)

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
      try:
        line = bench.measure(
          point, progress.set_postfix_str, done.get(point.key)
        )
      except Exception as error:  # the others must not suffer
        line = {"error": f"{type(error).__name__}: {error}"}
        text = terminal.escape(f"failed: {point.name}: {error}")
        tqdm.write(text, file=sys.stderr)
      lines.append({"point": point.settings, **line})
      progress.update()
  keys = {point.key for point in points}
  latest = {key(line): line for line in lines.entries if "run" in line}
  return [line for name, line in latest.items() if name in keys]
