"""Describes a Setup to the cost model: target and drafter on chips, by name.

What a calibration keeps is found by these names: fits of passes by model, and
the overhead of rounds by setting (`setting_of`).
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec import sharding
from specdec.benchmark import catalog
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target, held_name
from specdec.models import transformer
from specdec.roofline import chips, shapes
from specdec.roofline.calibration import Calibration
from specdec.roofline.chips import Chip
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import TargetDraftPair
from specdec.types import NO_COST, Model, PyTree, Skip
from specdec.utils import calls


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
  drafter = calls_name(setup.drafter_calls)
  if setup.draft_ways:
    drafter += f", {setup.draft_ways} ways"
  return f"{_target_name(setup)}, {drafter}, {rule}, {sampled}{filters}"


def calls_name(given: Sequence[calls.Call]) -> str:
  """Returns calls with | between them, as a calibration names them.

  One of a user's file has a checksum: rounds of one that was edited are timed
  anew. Layers to skip are numbers, whatever file they were read from.
  """
  names = []
  for call in given:
    file = Path(call.place or "").expanduser()
    if file.is_file():
      names.append(f"{call} {zlib.crc32(file.read_bytes()):08x}")
    elif call.place is None and call.name == "layer_skip":
      layers = {name: list(x) for name, x in skip_of(call)._asdict().items()}
      rest = {x: y for x, y in call.kwargs.items() if x not in layers}
      names.append(str(call._replace(args=(), kwargs=layers | rest)))
    else:
      names.append(str(call))
  return " | ".join(names)


def _target_name(setup: Setup) -> str:
  name = held_name(setup.target, setup.weights, setup.kv)
  if setup.num_nodes:
    name += f", num_nodes {setup.num_nodes}"
  return _placed(name, setup)


def _placed(name: str, setup: Setup) -> str:
  """Adds to a model's name with what and on what a setup runs it."""
  dtype = "" if setup.dtype == "float32" else f", {setup.dtype}"
  return name + dtype + (f", {setup.mesh}" if setup.mesh else "")


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


def passes_of(setup: Setup, target: Target, chip: Chip) -> list[Passes]:
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
    held = (arguments[name] for name in ("name", "weights", "kv"))
    draft_name = held_name(*held)
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
    name, options = f"{name}, {calls_name([call])}", {"skip": skip}
    shape = shapes.of_config(config, skip=skip)
    deployment = dataclasses.replace(ours.deployment, shape=shape)
  apply = functools.partial(model.apply, **options)
  return [ours, Passes(name, deployment, model._replace(apply=apply), params)]


def skip_of(call: calls.Call) -> Skip:
  """Returns the sublayers that layer_skip(...) leaves out."""
  layers = catalog.arguments_of(call)
  return Skip(*(tuple(layers[name] or ()) for name in Skip._fields))


def bare_pair(
  setup: Setup,
  target: Target,
  calibration: Calibration,
  bandwidth_ratio: float = 1.0,
) -> TargetDraftPair:
  """Returns target and drafter on the calibrated machine, without overhead."""
  chip = chips.of_hardware(calibration.hardware)
  deployment, *draft = (
    calibration.place(one.name, one.deployment, bandwidth_ratio)
    for one in passes_of(setup, target, chip)
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
  pair = bare_pair(setup, target, calibration, bandwidth_ratio)
  return dataclasses.replace(
    pair, overhead=fit.ours, baseline_overhead=fit.baseline
  )
