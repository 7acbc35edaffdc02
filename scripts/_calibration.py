"""A calibrated machine: made by timing, kept in a file, asked for costs."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import _decoding
import _skips
import jax
from absl import flags

from specdec import drafters, multihost
from specdec.benchmark import calibrate, timing
from specdec.roofline import chips, hardware, shapes
from specdec.roofline.calibration import (
  Calibration,
  PassTime,
  RoundTime,
  drift,
  fit_overhead,
  fit_passes,
)
from specdec.roofline.cost import Deployment, pass_bound
from specdec.roofline.pairs import TargetDraftPair
from specdec.utils import files, terminal
from specdec.utils.terminal import columns

FLAGS = flags.FLAGS
_REPEATS = 15


def setting() -> str:
  """What is beside the passes depends on it."""
  filters = "".join(
    f", {name}" for name in ("top_k", "top_p") if getattr(FLAGS, name)
  )
  distribution = "sampled" if FLAGS.temperature else "greedy"
  drafter = FLAGS.drafter
  if drafter == "model":
    drafter = FLAGS.draft
  elif drafter == "early_exit":
    drafter = f"exit after {FLAGS.exit_layer}"
  elif drafter == "learned":
    drafter = FLAGS.learned
  elif drafter == "layer_skip":
    drafter = _skips.describe()
  return (
    f"{_names()[0]}, {drafter}, {FLAGS.acceptance}, {distribution}{filters}"
  )


def _names() -> tuple[str, str | None]:
  """Under which target and draft are kept."""
  kind = "" if FLAGS.dtype == "float32" else f", {FLAGS.dtype}"
  if FLAGS.mesh:
    kind += f", {FLAGS.mesh}"
  draft = None
  if FLAGS.copy_first:
    raise ValueError(
      "the cost model prices rounds of one drafter: no --copy_first here"
    )
  if FLAGS.drafter == "model":
    ways = f", {FLAGS.draft_ways} ways" if FLAGS.draft_ways else ""
    draft = FLAGS.draft + kind + ways
  elif FLAGS.drafter == "early_exit":
    draft = f"{FLAGS.target}{kind}, first {FLAGS.exit_layer} layers"
  elif FLAGS.drafter == "layer_skip":
    if FLAGS.exit_threshold is not None:
      raise ValueError(
        "the cost model prices rounds of one length: no --exit_threshold here"
      )
    draft = f"{FLAGS.target}{kind}, {_skips.describe()}"
  return FLAGS.target + kind, draft


def _deployment(models, chip) -> tuple[Deployment, Deployment | None]:
  """Target and draft, no calibration in them yet."""
  types = {"weights": FLAGS.dtype, "kv": FLAGS.dtype}

  def deployment(config, place) -> Deployment:
    mesh = {}
    if place:
      mesh = {"ways": place.ways("query"), "replicas": place.ways("rows")}
    return Deployment(shapes.of_config(config), chip, **types, **mesh)

  where = models.places or (None, None)
  target = deployment(models.target.config, where[0])
  if FLAGS.drafter == "model":
    return target, deployment(models.draft.config, where[1])
  if FLAGS.drafter == "early_exit":
    return target, dataclasses.replace(target, stop=FLAGS.exit_layer)
  if FLAGS.drafter == "layer_skip":
    config = models.target.config
    less = shapes.of_config(config, skip=_skips.skip())
    return target, dataclasses.replace(target, shape=less)
  return target, None


def _paired(target, draft, *overhead) -> TargetDraftPair:
  """The two, as the flags say they share weights and caches."""
  exit_layer = FLAGS.exit_layer if FLAGS.drafter == "early_exit" else None
  skips = FLAGS.drafter == "layer_skip"
  return TargetDraftPair(target, draft, exit_layer, *overhead, skips=skips)


def pair_of(models, found: Calibration) -> TargetDraftPair:
  """Target and drafter on the calibrated machine.

  Raises:
    ValueError: the calibration is of other models or another setting.
  """
  chip = chips.of_hardware(found.hardware)
  deployment = _deployment(models, chip)
  target, draft = (
    p and found.place(name, p) for name, p in zip(_names(), deployment)
  )
  if setting() not in found.overhead:
    raise ValueError(
      f"this calibration knows {'; '.join(found.overhead)}, and not "
      f"{setting()}: "
      "run bench.py --calibrate with these flags"
    )
  overhead = found.overhead[setting()]
  return _paired(target, draft, overhead.ours, overhead.baseline)


def read(path: str | Path) -> Calibration | None:
  """A file of `write`, made on such a machine and with this JAX; None where
  there is none. Of several processes the first one's counts.

  Raises:
    ValueError: it is something else.
  """
  path = Path(path)
  text = path.read_text(encoding="utf-8") if path.exists() else None
  text = multihost.agree_text(text)
  if text is None:
    return None
  try:
    found = Calibration.from_json(text)
    made = f"{found.hardware.name} with JAX {found.hardware.jax_version}"
    here = f"{hardware.device_name()} with JAX {jax.__version__}"
    if made != here:
      raise ValueError(f"made on {made}, and this is {here}")
  except ValueError as error:
    raise ValueError(f"{path}: {error}; delete it or name another") from error
  return found


def write(path: str | Path, found: Calibration) -> None:
  """Keeps it; a kill leaves what was there."""
  files.replace_text(Path(path), found.to_json())


def knows(found: Calibration, batch: int, k: int) -> bool:
  """Whether it was made for these flags, with such a batch and k."""
  target, draft = _names()
  if setting() not in found.overhead or not _covers(
    found, target, batch, k + 1
  ):
    return False
  rounds = found.overhead[setting()].times
  return (
    max(r.batch for r in rounds) >= batch / 2
    and max(r.k for r in rounds) >= k / 2
    and (draft is None or _covers(found, draft, batch, 1))
  )


def _covers(found: Calibration, name: str, batch: int, tokens: int) -> bool:
  """Whether passes of that model were timed up to about so many tokens."""
  fit = found.fits.get(name)
  if fit is None:
    return False
  return max(t.batch * t.tokens for t in fit.times) >= 0.9 * batch * tokens


def timed(
  models,
  rows,
  size: int,
  batches,
  ks,
  context: int,
  base: Calibration | None = None,
  repeats: int = _REPEATS,
  most: tuple[int, int] | None = None,
  say: Callable[[str], None] | None = None,
) -> Calibration:
  """Times passes and rounds and fits them.

  Args:
    rows: prompts, as many as the largest batch.
    size: of the prompts' buffer.
    batches, ks: of the rounds that are timed.
    context: positions of a usual cache.
    base: of the same machine; what it knows is kept, and passes of models that
      it knows are not timed again.
    most: largest batch and tokens of a row in a pass that will be asked for;
      default those of the rounds.
  """
  say = say or functools.partial(terminal.report, file=sys.stderr)
  machine = base.hardware if base else hardware.local(progress=say)
  fits = dict(base.fits) if base else {}
  overhead = dict(base.overhead) if base else {}
  target, draft = _deployment(models, chips.of_hardware(machine))
  name, draft_name = _names()
  model = models.target_model
  most = most or (max(batches), max(ks) + 1)
  plans = {name: (target, (model, models.target.params), most)}
  if draft_name:
    if FLAGS.drafter == "model":
      own = models.draft_model, models.draft.params
    else:
      part = {"stop": FLAGS.exit_layer}
      if FLAGS.drafter == "layer_skip":
        part = {"skip": _skips.skip()}
      first = functools.partial(model.apply, **part)
      own = model._replace(apply=first), models.target.params
    plans[draft_name] = draft, own, (most[0], 2)
  if base:  # what was timed with fewer tokens is timed anew
    fits = {
      n: f
      for n, f in fits.items()
      if n not in plans or _covers(base, n, *plans[n][2])
    }
  groups, kept = [], {}
  for who, (_, own, shape) in plans.items():
    points, unseen = calibrate.plan(*shape, context)
    if who in fits:  # a few, to see how fast the machine runs by now
      points, unseen = [*points[::6], *unseen], []
    kept[who] = len(points)
    groups.append(calibrate.passes(*own, [*points, *unseen], say))

  def make(batch: int, k: int):
    made = _decoding.drafter(models, k)
    if FLAGS.drafter == "lookup":  # a draft token in every round
      made = drafters.lookup(k, ngram=FLAGS.ngram, min_ngram=0)
    rule = _decoding.rule()
    return _decoding.decoder_of(models, made, rule, batch, size, (), pilot=True)

  groups.append(calibrate.rounds(make, rows, batches, ks, say))
  *passes, taken = calibrate.in_turns(groups, repeats, say)
  _check(models, groups[0], passes[0])
  # What is timed later is kept as if timed with the rest.
  slower = 1.0
  if base and name in base.fits:
    now = [PassTime(*p, float(t)) for p, t in zip(groups[0].points, passes[0])]
    known = dataclasses.replace(target, efficiency=base.fits[name].efficiency)
    slower = drift(known, base.fits[name].times, now)
  deployment = {}
  for (who, (bare, _, _)), group, seconds in zip(plans.items(), groups, passes):
    if who not in fits:
      times = [
        PassTime(*p, float(t) / slower) for p, t in zip(group.points, seconds)
      ]
      some, others = times[: kept[who]], times[kept[who] :]
      fits[who] = fit_passes(bare, some, others)
    deployment[who] = dataclasses.replace(bare, efficiency=fits[who].efficiency)
  pair = _paired(deployment[name], deployment.get(draft_name))
  rounds = [
    RoundTime(*p, float(t) / slower) for p, t in zip(groups[-1].points, taken)
  ]
  overhead[setting()] = fit_overhead(pair, rounds)
  return Calibration(machine, fits, overhead)


def _check(models, group: calibrate.Timers, seconds) -> None:
  """Warns of passes of the target that its bytes forbid."""
  limit = timing.Limit(models.target.params)
  for (batch, tokens, slots), taken in zip(group.points, seconds):
    size = pass_bound(models.target.config, batch, tokens, slots // 2).bytes
    what = f"a pass of {batch} x {tokens} tokens"
    if warning := limit.check(what, taken, size):
      terminal.report(f"warning: {warning}", file=sys.stderr)


def describe(found: Calibration) -> str:
  """What was fitted, and how wrong it is."""
  header = ["model", "one", "weights", "KV", "FLOPs", "p", "ms a layer"]
  header += ["points", "rms", "formula alone", "held out", "worst"]
  lines = []
  for name, fit in found.fits.items():
    e = fit.efficiency
    lines.append(
      [
        name,
        *(f"{x:.0%}" for x in (e.one, e.weights, e.kv, e.flops)),
        f"{e.p:.2f}",
        f"{1e3 * e.layer_overhead:z.3f}",
        str(fit.in_sample.points),
        f"{fit.in_sample.rms:.1%}",
        f"{fit.formula.rms:.1%}",
        f"{fit.held_out.rms:.1%} of {fit.held_out.points}",
        f"{fit.held_out.worst:+.1%}",
      ]
    )
  text = columns(header, lines) + "\n\n"
  header = ["beside the passes", "batch", "ms a round", "ms a level"]
  header += ["rounds", "rms", "worst"]
  lines = []
  for name, fit in found.overhead.items():
    wrong = ["", "", ""]
    if fit.errors.points:  # more rounds than numbers that were fitted to them
      wrong = [str(fit.errors.points), f"{fit.errors.rms:.1%}"]
      wrong.append(f"{fit.errors.worst:+.1%}")
    for kind, one in ((name, fit.ours), ("  plain", fit.baseline)):
      for batch, fixed, of_level in one.rows:
        values = f"{1e3 * fixed:z.3f}", f"{1e3 * of_level:z.3f}"
        lines.append([kind, f"{batch:g}", *values, *wrong])
        kind, wrong = "", ["", "", ""]
  return text + columns(header, lines)
