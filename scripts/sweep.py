"""Runs a list of settings, each with its prediction beside its measurement.

  python scripts/sweep.py --sweep=configs/sweeps/shipped.py --output=runs/sweep
  python scripts/report.py runs/sweep             # the page

A sweep file's get_config() has `points`, a list of settings (flags of
generate.py: k, batch, temperature, drafter, draft, exit_layer, acceptance ...),
`common`, settings of all of them, `calibrate`, the batches and ks of the rounds
that the cost model is fitted to and the length of their texts (max_new_tokens,
default half the points'), which no point should repeat, and `whole`,
values for --context, --texts, --pairs and --calibration_repeats where these
are not given.

Every setting is calibrated once (runs/sweep/calibration.json): passes and
rounds are timed and the cost model is fitted to them. Then for every point the
texts are decoded without a clock, to see how draft tokens fare (above
temperature 0 with other noise), and timed, plain and speculative in turns. From
the calibration and the first count comes the prediction. A line of lines.jsonl
is added as each point finishes. Killed, the same command goes on and repeats
nothing; a point that fails is written down, and the others are measured
(--retry tries it again).

A line: point (its settings), run (as docs/schema.json says), rounds (of all
that was timed), prediction, observed (what was counted without a clock),
context (slots of cache), load, date; or point and error.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import _config
import _decoding
import _flags
import _main
import _mesh
import _output
import _rows
from _sweep_bench import Bench, calibrated_tokens, measured
from absl import flags
from absl.testing import flagsaver
from ml_collections import ConfigDict
from tqdm import tqdm

from specdec.benchmark import metrics
from specdec.utils import files, terminal
from specdec.utils.spelling import choices
from specdec.utils.terminal import columns, escape

_SWEEP = _config.define(
  "sweep", "Python file whose get_config() lists the points.", "sweeps/*.py"
)
_BEFORE = set(flags.FLAGS)
flags.DEFINE_integer("texts", 16, "Prompts, at least as many as a batch has.")
flags.DEFINE_integer(
  "pairs",
  12,
  "Batches that are timed both ways, at least: the texts are decoded again, "
  "above temperature 0 with other noise, until there are as many.",
)
flags.DEFINE_integer("calibration_repeats", 21, "Timings of a calibration.")
flags.DEFINE_bool("retry", False, "Try points again that failed before.")
flags.DEFINE_bool(
  "repredict",
  False,
  "Predict again what is measured already, by the fits in calibration.json; "
  "without that file the machine is calibrated anew.",
)
flags.DEFINE_string(
  "shard",
  None,
  "I/N: every N-th point from the I-th on, so that N machines share a sweep, "
  "each with an --output of its own; report.py takes all of them.",
)
FLAGS = flags.FLAGS
for _module in (_flags, _output, _rows):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = sorted({*FLAGS} - _BEFORE | {"output", "context"})
FLAG_NAMES = [*_flags.SHARED, *_OWN]
# Of the machine and not of a point: they come from the command line.
_PLACE = ("compilation_cache", "mesh", *_mesh.PROCESSES)
_NOT_OF_POINTS = ("json", "shape", *_PLACE)
_PARTS = ("points", "common", "calibrate", "whole")
_WHOLE = ("context", "texts", "pairs", "calibration_repeats")


def _settings(values, source: str, accepted) -> dict:
  """Parses one dict of the sweep file as the command line would.

  Raises:
    ValueError: it is no dict, or a name or a value is not valid.
  """
  if not isinstance(values, Mapping | ConfigDict):
    raise ValueError(f"{source} is {values!r:.60}; it must be a dict of flags")
  settings = {}
  for name, value in values.items():
    if name not in accepted:
      raise ValueError(f"{source} sets {name!r}; {choices(name, accepted)}")
    settings[name] = _config.parsed(FLAGS[name], value, source)
  return settings


def _part(sweep, name: str, accepted) -> dict:
  return _settings(sweep.get(name, {}), f"the sweep's {name}", accepted)


def settings_of(sweep) -> list[dict]:
  """Returns every point, whole.

  Raises:
    ValueError: there is none, one sets what it may not, or two are the same.
  """
  for name in sweep:
    if name not in _PARTS:
      raise ValueError(f"the sweep sets {name!r}; {choices(name, _PARTS)}")
  accepted = [x for x in _flags.SHARED if x not in _NOT_OF_POINTS]
  common = _part(sweep, "common", accepted)
  points = sweep.get("points", ())
  if not isinstance(points, list | tuple) or not points:
    raise ValueError("the sweep's get_config() has no points, a list of dicts")
  points = [
    common | _settings(point, f"the sweep's points[{i}]", accepted)
    for i, point in enumerate(points)
  ]
  for point in points:  # 4 as such, for the key
    for name in ("k", "batch"):
      if len(point.get(name) or ()) == 1:
        [point[name]] = point[name]
  keys = [key_of(point) for point in points]
  for key in keys:
    if keys.count(key) > 1:
      raise ValueError(f"the sweep has this point twice: {key}")
  return points


def calibration_of(sweep) -> dict:
  """Returns `calibrate`, each entry that is missing with its default."""
  names = ("batch", "k", "max_new_tokens")
  usual = {"batch": (1, 3), "k": (2, 5), "max_new_tokens": None}
  rounds = usual | _part(sweep, "calibrate", names)
  for name in ("batch", "k"):
    if min(rounds[name] or (0,)) < 1:
      raise ValueError(
        f"the sweep's calibrate sets {name} = {rounds[name]}; it must be "
        "integers >= 1"
      )
  return rounds


def key_of(point: dict) -> str:
  return json.dumps(point, sort_keys=True)


def table(lines: list[dict]) -> str:
  """A line for every point that was measured."""
  header = ["drafter", "rule", "T", "batch", "k", "tokens/round", "predicted"]
  header += ["measured", "measured/predicted"]
  found = []
  for line in lines:
    point, run = line["point"], line["run"]
    speed = metrics.Estimate(**run["speed"]["speedup"])
    said = line["prediction"]["speedup"]
    found.append(
      [
        line["drafter"],
        point.get("acceptance", "coupled"),
        f"{point.get('temperature', 0):g}",
        str(run["batch"]),
        str(run["k"]),
        f"{run['acceptance']['tokens_per_pass']['value']:.2f}",
        f"{said:.2f}",
        str(speed),
        f"{speed.value / said:.2f}",
      ]
    )
  return columns(header, found)


def own_points(points: list[dict]) -> list[dict]:
  """Those of --shard.

  Raises:
    ValueError: it is not I/N with 0 <= I < N.
  """
  if FLAGS.shard is None:
    return points
  part, _, parts = FLAGS.shard.partition("/")
  numbers = part.isdecimal() and parts.isdecimal()
  if not numbers or not int(part) < int(parts):
    raise ValueError(f"--shard={FLAGS.shard}; it must be I/N with 0 <= I < N")
  return points[int(part) :: int(parts)]


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  if not _SWEEP.value:
    raise ValueError("give --sweep=configs/sweeps/NAME.py, the list of points")
  if not FLAGS.output:
    raise ValueError("give --output, a folder for the results")
  for name in (*_flags.SHARED, "config"):
    if FLAGS[name].present and name not in _PLACE:
      raise ValueError(f"--{name}: write it into the sweep file's `common`")
  for name, value in _part(_SWEEP.value, "whole", _WHOLE).items():
    if not FLAGS[name].present:
      setattr(FLAGS, name, value)
  for name in _WHOLE:
    if FLAGS[name].value < 1:
      raise ValueError(f"--{name}={FLAGS[name].value}; it must be >= 1")


def sweep() -> None:
  """Every point that is not yet in the folder."""
  check_flags()
  points = own_points(settings_of(_SWEEP.value))
  rounds = calibration_of(_SWEEP.value)
  _mesh.join()
  _main.take_folder("--output", FLAGS.output)
  most = [max(rounds["batch"]), max(rounds["k"])]
  for point in points:  # all of them, before anything long begins
    with flagsaver.flagsaver(**flags_of(point)):
      _flags.settle(_OWN)
      found = _flags.single("batch"), _flags.single("k")
      most = list(map(max, most, found))
      length = calibrated_tokens(rounds)
      if length <= max(rounds["k"]):
        raise ValueError(
          f"calibrated texts of {length} new tokens have no room for a round "
          f"of k = {max(rounds['k'])}"
        )
      again = found[0] in rounds["batch"] and found[1] in rounds["k"]
      if again and length == FLAGS.max_new_tokens:
        raise ValueError(
          f"batch {found[0]} with k = {found[1]} is evaluated and is among the "
          "rounds to calibrate with; take others, or texts of another length"
        )
      if FLAGS.texts % _flags.single("batch"):
        raise ValueError(
          f"--texts={FLAGS.texts} is no multiple of the batch "
          f"{_flags.single('batch')}"
        )
  folder = Path(FLAGS.output)
  whole = {name: FLAGS[name].value for name in _WHOLE}
  whole |= {"calibrate": rounds, "shard": FLAGS.shard, "mesh": FLAGS.mesh}
  files.claim(folder, whole, free=("calibration_repeats",))
  lines = files.Lines(folder / "lines.jsonl")
  for broken in lines.broken:
    terminal.report(f"skipped: {broken}", file=sys.stderr)
  entries = [x for x in lines.entries if "point" in x]
  known = {key_of(x["point"]): x for x in entries if "run" in x}
  done = set(known)
  if not FLAGS.retry:
    done |= {key_of(x["point"]) for x in entries if "error" in x}
  if FLAGS.repredict:
    left = [point for point in points if key_of(point) in known]
  else:
    left = [point for point in points if key_of(point) not in done]
  bench = Bench(folder, rounds, (most[0], most[1] + 1))
  if not (folder / "header.json").exists():
    header = _decoding.header(_OWN)
    files.replace_text(folder / "header.json", json.dumps(header) + "\n")
  with tqdm(
    total=len(points), initial=len(points) - len(left), unit="point"
  ) as progress:
    for point in left:
      name = " ".join(f"{key}={value}" for key, value in point.items())
      try:
        with flagsaver.flagsaver(**flags_of(point)):
          _flags.settle(_OWN)
          found = measured(
            bench, progress.set_postfix_str, known.get(key_of(point))
          )
      except Exception as error:  # the others must not suffer
        found = {"error": f"{type(error).__name__}: {error}"}
        text = escape(f"failed: {name}: {error}")
        tqdm.write(text, file=sys.stderr)
      lines.append({"point": point, **found})
      progress.update()
  own = {key_of(point) for point in points}
  measured_lines = {
    key_of(line["point"]): line
    for line in lines.entries
    if "run" in line and key_of(line["point"]) in own
  }
  terminal.report(table(list(measured_lines.values())))
  failed = len(points) - len(measured_lines)
  if failed:
    terminal.report(f"{failed} points failed; {folder}/lines.jsonl says why")


def flags_of(point: dict) -> dict:
  """A point's values as flags have them."""
  values = dict(point)
  for name in ("k", "batch"):
    if name in values:
      values[name] = FLAGS[name].parser.parse(values[name])
  return values


main = _main.main_of(
  "sweep", sweep, interrupted="stopped; the same command goes on from here"
)

if __name__ == "__main__":
  _main.start(main)
