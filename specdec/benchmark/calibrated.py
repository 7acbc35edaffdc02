"""Calibrates the cost model for a Setup by timing, and keeps it in a file.

A file holds, of one machine, fits of passes by model and the overhead of rounds
by setting (`setting_of`). What a drafter costs beyond the passes of a decoder
that is timed here is priced by its own `Drafter.cost`; where that is unknown
it is part of the fitted overhead.
"""

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from specdec import draft_shape, multihost, sharding
from specdec.benchmark import calibrate, catalog, timing
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.rows import Source, make_rows
from specdec.benchmark.setup import Setup, silent
from specdec.benchmark.target import Target, held_name
from specdec.models import transformer
from specdec.noise import pilot_key
from specdec.roofline import chips, hardware, shapes
from specdec.roofline.calibration import (
  Calibration,
  PassTime,
  drift,
  fit_overhead,
  fit_passes,
)
from specdec.roofline.chips import Chip
from specdec.roofline.cost import Deployment, pass_bound
from specdec.roofline.round_cost import TargetDraftPair
from specdec.types import NO_COST, Model, PyTree, Skip
from specdec.utils import calls, files

_REPEATS = 15
Report = Callable[[str], None]


class Passes(NamedTuple):
  """Passes of one model, timed apart from rounds."""

  name: str  # under which their fit is kept
  deployment: Deployment
  model: Model
  params: PyTree


def setting_of(setup: Setup) -> str:
  """Returns the name under which the overhead of a setup's rounds is kept."""
  filters = "".join(
    f", {name}" for name in ("top_k", "top_p") if getattr(setup, name)
  )
  sampled = "sampled" if setup.temperature else "greedy"
  rule = calls_name([calls.parse(setup.acceptance)])
  return (
    f"{_target_name(setup)}, {_drafter_name(setup)}, {rule}, {sampled}{filters}"
  )


def _drafter_name(setup: Setup) -> str:
  """Returns the drafter's call, layers to skip by numbers instead of a file."""
  call = setup.call_of("layer_skip")
  if call is None:
    return calls_name(setup.drafter_calls)
  layers = {name: list(x) for name, x in skip_of(call)._asdict().items()}
  return str(call._replace(args=(), kwargs=layers))


def calls_name(given: Sequence[calls.Call]) -> str:
  """Returns calls with | between them, each of a user's file with a checksum:
  rounds of one that was edited are timed anew."""
  names = []
  for call in given:
    file = Path(call.place or "").expanduser()
    checksum = zlib.crc32(file.read_bytes()) if file.is_file() else None
    names.append(str(call) if checksum is None else f"{call} {checksum:08x}")
  return " | ".join(names)


def _target_name(setup: Setup) -> str:
  return _placed(held_name(setup.target, setup.weights), setup)


def _placed(name: str, setup: Setup) -> str:
  """Adds to a model's name with what and on what a setup runs it."""
  dtype = "" if setup.dtype == "float32" else f", {setup.dtype}"
  return name + dtype + (f", {setup.mesh}" if setup.mesh else "")


def check(setup: Setup) -> None:
  """Refuses setups whose rounds are not all of one kind and length."""
  if setup.shape != "chain":
    raise ValueError(f"calibration is of chains, not shape = {setup.shape}")
  call = setup.drafter_calls[0]
  if len(setup.drafter_calls) > 1:
    raise ValueError(
      "calibration prices rounds of one drafter, and of "
      f"{setup.drafter} each round may be of either; give a number for k"
    )
  taken = inspect.signature(
    calls.find(call, catalog.DRAFTERS, "drafter")
  ).parameters
  if call.place is not None and not {"k", "shape"} & {*taken}:
    raise ValueError(f"{call} takes neither k nor shape: there is no k to fit")
  decides = call is setup.call_of("suffix")
  if call is setup.call_of("layer_skip"):
    decides = catalog.arguments_of(call)["threshold"] is not None
  if decides:
    raise ValueError(
      f"{setup.drafter} decides how much it drafts; calibration prices rounds "
      "of one length"
    )


def on_mesh(
  deployment: Deployment, place: sharding.Placement | None
) -> Deployment:
  """Returns a deployment spread over a mesh, if there is one."""
  if place is None:
    return deployment
  ways, replicas = place.ways("query"), place.ways("rows")
  return dataclasses.replace(deployment, ways=ways, replicas=replicas)


def target_deployment(setup: Setup, target: Target, chip: Chip) -> Deployment:
  """Returns the target on chips, spread over the setup's mesh."""
  config = target.checkpoint.config
  deployment = Deployment(
    shapes.of_config(config),
    chip,
    weights=setup.dtype,
    kv=setup.dtype,
    source=setup.prompt_size if config.encoder_layers else 0,
  )
  return on_mesh(deployment, target.places and target.places.target)


def _passes(setup: Setup, target: Target, chip: Chip) -> list[Passes]:
  """Returns passes of the target, and of the decoder that drafts, if any."""
  config, params = target.checkpoint.config, target.checkpoint.params
  name, model = _target_name(setup), target.model
  ours = Passes(name, target_deployment(setup, target, chip), model, params)
  call = setup.call_of("model", "pard", "early_exit", "layer_skip")
  if call is None:
    return [ours]
  if call.name in ("model", "pard"):
    setup.make_drafter(target)  # reads the draft's checkpoint
    arguments = catalog.arguments_of(call)
    draft_name = held_name(arguments["name"], arguments["weights"])
    draft, place = target.drafts[draft_name], target.draft_place
    name = _placed(draft_name, setup)
    name += f", {setup.draft_ways} ways" if setup.draft_ways else ""
    shape = shapes.of_config(draft.config)
    deployment = dataclasses.replace(ours.deployment, shape=shape)
    deployment = on_mesh(deployment, place)
    model = transformer.model(draft.config, place)
    return [ours, Passes(name, deployment, model, draft.params)]
  if call.name == "early_exit":
    layer = catalog.arguments_of(call)["layer"]
    name, options = f"{name}, first {layer} layers", {"stop": layer}
    deployment = dataclasses.replace(ours.deployment, stop=layer)
  else:
    skip = skip_of(call)
    name, options = f"{name}, {_drafter_name(setup)}", {"skip": skip}
    shape = shapes.of_config(config, skip=skip)
    deployment = dataclasses.replace(ours.deployment, shape=shape)
  apply = functools.partial(model.apply, **options)
  return [ours, Passes(name, deployment, model._replace(apply=apply), params)]


def skip_of(call: calls.Call) -> Skip:
  """Returns the sublayers that layer_skip(...) leaves out."""
  layers = catalog.arguments_of(call)
  return Skip(*(tuple(layers[name] or ()) for name in Skip._fields))


def _pair(
  setup: Setup,
  target: Target,
  calibration: Calibration,
  bandwidth_ratio: float = 1.0,
) -> TargetDraftPair:
  """Returns target and drafter on the calibrated machine, without overhead."""
  chip = chips.of_hardware(calibration.hardware)
  deployment, *draft = (
    calibration.place(one.name, one.deployment, bandwidth_ratio)
    for one in _passes(setup, target, chip)
  )
  cost = setup.make_drafter(target).drafter.cost
  if cost is None or not cost.is_complete:
    cost = NO_COST  # what drafting takes is then fitted with the overhead
  return TargetDraftPair(deployment, cost, *draft)


def pair_of(
  setup: Setup,
  target: Target,
  calibration: Calibration,
  bandwidth: float | None = None,
) -> TargetDraftPair:
  """Returns target and drafter on the calibrated machine, with its bandwidth
  now, or, None, as it was then."""
  setting = setting_of(setup)
  if setting not in calibration.overhead:
    raise ValueError(
      f"this calibration has {'; '.join(calibration.overhead)}, and not "
      f"{setting}: run bench.py --calibrate with these flags"
    )
  fit = calibration.overhead[setting]
  then = calibration.bandwidth.get(_target_name(setup))
  bandwidth_ratio = bandwidth / then if bandwidth and then else 1.0
  pair = _pair(setup, target, calibration, bandwidth_ratio)
  return dataclasses.replace(
    pair, overhead=fit.ours, baseline_overhead=fit.baseline
  )


def read(path: str | Path) -> Calibration | None:
  """Reads a file of `write`, made on such a machine and with this JAX; None
  where there is none. Of several processes the first one's counts."""
  path = Path(path)
  text = None
  if path.exists():
    text = path.read_text(encoding="utf-8", errors="replace")
  text = multihost.agree_text(text)
  if text is None:
    return None
  try:
    calibration = Calibration.from_json(text)
    machine = calibration.hardware
    there = f"{machine.name} with JAX {machine.jax_version}"
    here = f"{hardware.device_name()} with JAX {jax.__version__}"
    if there != here:
      raise ValueError(f"made on {there}, and this is {here}")
  except ValueError as error:
    raise ValueError(f"{path}: {error}; delete it or name another") from error
  return calibration


def write(path: str | Path, calibration: Calibration) -> None:
  """Writes it; a kill leaves what was there."""
  files.replace_text(Path(path), calibration.to_json())


def add(
  path: str | Path, calibration: Calibration, base: Calibration | None
) -> None:
  """Writes what a calibration has beyond `base`, which was read from the file
  before it was timed; models and settings that only others wrote since then
  stay."""
  latest = read(path)
  if latest is not None and latest != base:
    parts = {}
    for name in ("fits", "overhead", "bandwidth"):
      before, now = getattr(base, name, {}), getattr(calibration, name)
      ours = {key: x for key, x in now.items() if before.get(key) != x}
      parts[name] = getattr(latest, name) | ours
    calibration = dataclasses.replace(calibration, **parts)
  write(path, calibration)


def step_ks(most_k: int) -> list[int]:
  """Returns the draft tokens of rounds whose times --k=auto decides by."""
  return [width - 1 for width in draft_shape.step_widths(most_k)[1:]]


def covers(
  setup: Setup,
  target: Target,
  calibration: Calibration,
  batch: int,
  k: int,
  ks: Sequence[int] = (),
) -> bool:
  """Whether it was made for this setup, with about such a batch and k, and
  with rounds of all of `ks`, timed with one batch."""
  setting = setting_of(setup)
  if setting not in calibration.overhead:
    return False
  passes = _passes(setup, target, chips.of_hardware(calibration.hardware))
  timed_ks: dict[int, set[int]] = {}
  for r in calibration.overhead[setting].times:
    timed_ks.setdefault(r.batch, set()).add(r.k)
  near = [
    one
    for one, known in timed_ks.items()
    if max(known) >= k / 2 and known >= {*ks} and one / 2 <= batch <= 2 * one
  ]
  return bool(near) and all(
    _has_passes(calibration, one.name, batch, tokens)
    for one, tokens in zip(passes, (k + 1, 1))
  )


def _has_passes(
  calibration: Calibration, name: str, batch: int, tokens: int
) -> bool:
  """Whether passes of that model were timed up to about so many tokens."""
  times = calibration.fits[name].times if name in calibration.fits else ()
  return any(t.batch * t.tokens >= 0.9 * batch * tokens for t in times)


def pilot(setup: Setup, target: Target) -> Decoder:
  """Returns a decoder with noise of its own, to decide how others decode."""
  decoder = setup.decoder(target)
  return dataclasses.replace(decoder, key=pilot_key(decoder.key), eos_ids=())


def timed(
  setup: Setup,
  target: Target,
  rows: Sequence[Sequence[int]],
  batches: Sequence[int],
  ks: Sequence[int],
  context: int,
  base: Calibration | None = None,
  repeats: int = _REPEATS,
  most: tuple[int, int] | None = None,
  report: Report = silent,
) -> Calibration:
  """Times passes and rounds, in turns, and fits them.

  Args:
    setup: prompt_size is that of the rows' buffer.
    rows: prompts, as many as the largest batch.
    batches, ks: of the rounds that are timed.
    context: positions of a usual cache.
    base: of the same machine; what it has is kept, and passes of its models are
      not timed again.
    most: largest batch and tokens of a row in a pass that will be asked for;
      default those of the rounds.
  """
  check(setup)
  machine = base.hardware if base else hardware.local(progress=report)
  base = base or Calibration(machine)
  most = most or (max(batches), max(ks) + 1)
  passes = _passes(setup, target, chips.of_hardware(machine))
  plans: dict[str, tuple[Passes, tuple[int, int]]] = {}
  for one, sizes in zip(passes, (most, (most[0], 2))):
    plans.setdefault(one.name, (one, sizes))
  fits = {  # what was timed with fewer tokens is timed anew
    name: fit
    for name, fit in base.fits.items()
    if name not in plans or _has_passes(base, name, *plans[name][1])
  }
  groups, kept = [], []
  for name, (one, sizes) in plans.items():
    points, unseen = calibrate.plan(*sizes, context)
    if name in fits:  # a few, to see how fast the machine runs by now
      points, unseen = [*points[::6], *unseen], []
    kept.append(len(points))
    points = [*points, *unseen]
    source = max(1, one.deployment.source)
    timers = calibrate.passes(one.model, one.params, points, report, source)
    groups.append(timers)
  drafting, lookup = setup, setup.call_of("lookup")
  if lookup is not None:  # a draft in every round
    ngram = catalog.arguments_of(lookup)["ngram"]
    always = f"lookup(ngram={ngram}, min_ngram=0)"
    drafting = dataclasses.replace(setup, drafter=always)
  elif setup.call_of("recycling") is not None:
    drafting = dataclasses.replace(setup, drafter="recycling(full=True)")

  def make(batch: int, k: int) -> Decoder:
    return pilot(dataclasses.replace(drafting, batch=batch, k=k), target)

  groups.append(calibrate.rounds(make, rows, batches, ks, report))
  groups.append([calibrate.reading(target.checkpoint.params, groups[0][0])])
  times = calibrate.in_turns(groups, repeats, report)
  _warn_impossible(target, times[0], report)
  ours, slower = passes[0], 1.0
  if ours.name in base.fits:  # what is timed now is kept as if timed then
    fitted = base.place(ours.name, ours.deployment)
    slower = drift(fitted, base.fits[ours.name].times, times[0])
  *timed_passes, rounds, [reading] = (
    [time._replace(seconds=time.seconds / slower) for time in group]
    for group in times
  )
  for (one, _), count, group in zip(plans.values(), kept, timed_passes):
    if one.name not in fits:
      some, others = group[:count], group[count:]
      fits[one.name] = fit_passes(one.deployment, some, others)
  pair = _pair(setup, target, Calibration(machine, fits))
  setting = setting_of(setup)
  if setting in base.overhead:  # what is not timed anew stays known
    earlier, anew = base.overhead[setting].times, {r[:2] for r in rounds}
    rounds = [*(r for r in earlier if r[:2] not in anew), *rounds]
  overhead = {setting: fit_overhead(pair, rounds)}
  bandwidth = {ours.name: 1 / reading.seconds} | base.bandwidth
  return Calibration(machine, fits, base.overhead | overhead, bandwidth)


def _warn_impossible(
  target: Target, times: Sequence[PassTime], report: Report
) -> None:
  """Warns of passes of the target that its bytes forbid."""
  config = target.checkpoint.config
  limit = timing.Limit(target.checkpoint.params)
  for batch, tokens, slots, taken in times:
    what = f"a pass of {batch} x {tokens} tokens"
    size = pass_bound(config, batch, tokens, slots // 2).bytes
    if warning := limit.check(what, taken, size):
      report(f"warning: {warning}")


def calibrate_file(
  path: str,
  setup: Setup,
  target: Target,
  source: Source,
  repeats: int,
  report: Report,
) -> Calibration:
  """Times passes and rounds up to a setup's batch and k, on prompts of its
  prompt_size, and adds their fits to a file."""
  most_k, size = max(setup.levels, 1), setup.prompt_size
  # A head may have no more levels.
  ks = {2, 5, *step_ks(most_k)}
  ks = sorted(k for k in ks if k <= most_k or not setup.has_heads)
  batches = sorted({1, (setup.batch + 1) // 2, setup.batch})
  base = read(path)
  calibration = timed(
    setup,
    target,
    make_rows(source, setup.batch, size),
    batches,
    ks,
    size + setup.max_new_tokens + max(ks),
    base,
    repeats,
    report=report,
  )
  add(path, calibration, base)
  return calibration
