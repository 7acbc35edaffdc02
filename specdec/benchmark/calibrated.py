"""Calibrates the cost model for a Setup by timing, and keeps it in a file.

A file holds, of one machine, fits of passes by model and the overhead of rounds
by setting (`deployments.setting_of`). What a drafter costs beyond the passes of
a decoder that is timed here is priced by its own `Drafter.cost`; where that is
unknown it is part of the fitted overhead.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from specdec import draft_shape, multihost
from specdec.benchmark import calibrate, catalog, deployments, timing
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.rows import Source, make_rows
from specdec.benchmark.setup import Setup, silent
from specdec.benchmark.target import Target
from specdec.noise import pilot_key
from specdec.roofline import chips, hardware
from specdec.roofline.calibration import (
  Calibration,
  PassTime,
  drift,
  fit_overhead,
  fit_passes,
)
from specdec.roofline.cost import pass_bound
from specdec.utils import calls, files

_REPEATS = 15
Report = Callable[[str], None]


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
  setting = deployments.setting_of(setup)
  if setting not in calibration.overhead:
    return False
  chip = chips.of_hardware(calibration.hardware)
  passes = deployments.passes_of(setup, target, chip)
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
  passes = deployments.passes_of(setup, target, chips.of_hardware(machine))
  plans: dict[str, tuple[deployments.Passes, tuple[int, int]]] = {}
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
  pair = deployments.bare_pair(setup, target, Calibration(machine, fits))
  setting = deployments.setting_of(setup)
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
