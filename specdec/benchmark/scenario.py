"""What a prediction is about: a target and a drafter on chips, by name.

Scenario("llama3-70b", "model(llama3-1b)", chips.get("v6e"), ways=8).pair
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from specdec import checkpoints
from specdec.benchmark import abstract, catalog
from specdec.benchmark.setup import Setup
from specdec.checkpoints.fetch import fetch
from specdec.models import presets
from specdec.models.config import TransformerConfig
from specdec.roofline import chips, drafter_cost, hardware, shapes
from specdec.roofline.calibration import Calibration
from specdec.roofline.chips import Chip
from specdec.roofline.cost import BYTES, TYPICAL, Deployment, Efficiency
from specdec.roofline.pairs import TargetDraftPair
from specdec.roofline.round_cost import deployment_of
from specdec.types import NO_COST, DrafterCost
from specdec.utils import calls
from specdec.utils.calls import Call
from specdec.utils.spelling import choices


def find_chip(
  name: str,
  numbers: Mapping[str, float] | None = None,
  progress: Callable[[str], None] | None = None,
) -> Chip:
  """Returns a chip by name, or, for 'local', this machine as measured.

  Args:
    numbers: replace the datasheet's; see chips.changed.
    progress: as of hardware.local.

  Raises:
    ValueError: there is no such chip, or it has no such number.
  """
  numbers = dict(numbers or {})
  if name != "local":
    return chips.get(name, **numbers)
  return chips.changed(
    chips.of_hardware(hardware.local(progress=progress)), **numbers
  )


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A target and a drafter on chips.

  Attributes:
    target: a published shape (shapes.names()), preset:NAME, or a checkpoint.
    drafter: a call, or two with | between them; model(0.03) is a draft model
      with that share of the target's weights.
    chip: where both run.
    weights, kv: dtypes in which both models' weights and KV are held.
    compute: dtype of products; None: as the weights.
    ways: chips that share the target's weights.
    replicas: groups of such chips, which share the batch.
    draft_ways: chips that share the draft model's weights; None: `ways`.
    efficiency: of the chip, without a calibration.
    correlation, source: as of Deployment.
    most: largest k.
    calibration: of the machine that `chip` is; its efficiencies and overheads
      are used.
  """

  target: str
  drafter: str
  chip: Chip
  weights: str = "bfloat16"
  kv: str = "bfloat16"
  compute: str | None = None
  ways: int = 1
  replicas: int = 1
  draft_ways: int | None = None
  efficiency: Efficiency = TYPICAL
  correlation: float = 0.75
  source: int = 0
  most: int = 8
  calibration: Calibration | None = None

  def __post_init__(self):
    if len(self.drafter_calls) > 2:
      raise ValueError(f"{self.drafter}: at most two drafters, with one |")
    if len(self.drafter_calls) == 1 and "k" in self.drafter_calls[0].kwargs:
      raise ValueError(
        f"{self.drafter}: every k up to most = {self.most} is priced; leave k "
        "out"
      )
    if self.draft_ways is not None and self.draft_name is None:
      raise ValueError(
        f"draft_ways is for a draft model; {self.drafter} is none"
      )
    if self.source and not any(x.source_kv for x in self.shape.layers):
      raise ValueError(f"source: {self.target} has no cross-attention")

  @classmethod
  def calibrated(
    cls, calibration: Calibration, target: str, drafter: str, **settings
  ) -> "Scenario":
    """Returns a scenario on a calibrated machine, all in float32."""
    chip = chips.of_hardware(calibration.hardware)
    types = {"weights": "float32", "kv": "float32"}
    return cls(
      target, drafter, chip, **types, calibration=calibration, **settings
    )

  def on(self, chip: Chip) -> "Scenario":
    """Returns the same on another chip, not calibrated."""
    return dataclasses.replace(self, chip=chip, calibration=None)

  @functools.cached_property
  def drafter_calls(self) -> list[Call]:
    """The drafter's calls, parsed."""
    return calls.parse_all(self.drafter)

  @property
  def draft_name(self) -> str | None:
    """The draft model's name; None: another drafter drafts."""
    names = [_name(call) for call in self.drafter_calls if _is_model(call)]
    return names[-1] if names else None

  @property
  def num_chips(self) -> int:
    """Chips of all replicas."""
    return self.ways * self.replicas

  @functools.cached_property
  def config(self) -> TransformerConfig | None:
    """The target's config; None: it is a shape that no config expresses."""
    return _config(self.target, self._dtype)

  @functools.cached_property
  def shape(self) -> shapes.Shape:
    """The target's shape."""
    return self.shape_of(self.target)

  def shape_of(self, name: str) -> shapes.Shape:
    """Returns a model's shape, or that of a share of the target.

    Raises:
      ValueError: there is no such model.
    """
    if name in shapes.names():
      return shapes.get(name)
    try:
      share = float(name)
    except ValueError:
      return shapes.of_config(_config(name, self._dtype), name)
    if name == self.target:
      raise ValueError(
        f"target {name} is a share of itself; give a checkpoint or one of "
        f"{', '.join(shapes.names())}"
      )
    return shapes.scaled(self.shape, share)

  @property
  def _dtype(self) -> str:
    return "float32" if self.weights == "float32" else "bfloat16"

  @functools.cached_property
  def cost(self) -> DrafterCost:
    """What the drafter holds and reads.

    Raises:
      ValueError: it does not fit the target, or has no cost.
    """
    if self.draft_name is None:
      return self._cost(self.drafter)
    costs = []
    for call in self.drafter_calls:  # whose k is a matter of rounds
      kwargs = {name: x for name, x in call.kwargs.items() if name != "k"}
      costs.append(self._cost(str(call._replace(kwargs=kwargs))))
    return costs[0] if len(costs) == 1 else drafter_cost.fallback(*costs)

  def _cost(self, drafter: str) -> DrafterCost:
    """Returns the cost of drafters none of which, or the only, is a model."""
    call, *others = calls.parse_all(drafter)
    if _is_model(call) and not others:
      return drafter_cost.model(self.shape_of(_name(call)), self.weights)
    if call.name == "none" and call.place is None:
      raise ValueError("none drafts nothing; drafts of lookup cost nothing")
    if call.name == "layer_skip" and call.place is None:
      _check_threshold(call)
    if self.config is None:
      return self._cost_by_shape(call)
    name = self.target
    if name in presets.names():
      name = catalog.PRESET + name
    setup = Setup(
      name, drafter, k=self.most, dtype=self._dtype, random_weights=True
    )
    built = abstract.drafter(setup, abstract.target(setup)).drafter
    if built.cost is None or not built.cost.is_known:
      raise ValueError(
        f"{drafter} has no cost: its Drafter does not say what it holds and "
        "reads (docs/extending.md)"
      )
    cost = built.cost
    # Of the target's weights a head reads what the target itself would.
    by = BYTES[self.weights] / BYTES[self._dtype]
    step = cost.step._replace(target_bytes=by * cost.step.target_bytes)
    return dataclasses.replace(cost, step=step)

  def _cost_by_shape(self, call: Call) -> DrafterCost:
    """Returns the cost of what a shape alone can draft."""
    constructors = {
      "lookup": lambda k=0, ngram=5, min_ngram=3: NO_COST,
      "early_exit": drafter_cost.early_exit,
    }
    if call.place is not None or call.name not in constructors:
      raise ValueError(
        f"{call} needs a target that is a checkpoint; {self.target} is a "
        f"shape: take model(NAME), {' or '.join(constructors)}"
      )
    return calls.invoke(call, constructors[call.name], {})

  @functools.cached_property
  def pair(self) -> TargetDraftPair:
    """Target and drafter as the cost model takes them.

    Raises:
      ValueError: they do not fit together, or the calibration has no such
        model.
    """
    target = Deployment(
      self.shape,
      self.chip,
      self.weights,
      self.kv,
      self.compute,
      self.ways,
      self.replicas,
      self.efficiency,
      source=self.source,
      correlation=self.correlation,
    )
    if self.cost.exit_layer >= len(self.shape.layers):
      raise ValueError(
        f"{self.drafter}: {self.target} has {len(self.shape.layers)} layers; "
        "an exit is after fewer"
      )
    draft = deployment_of(target, self.cost)
    if self.draft_name is not None:
      draft = dataclasses.replace(draft, ways=self.draft_ways or self.ways)
    pair = TargetDraftPair(target, draft, drafter=self.cost)
    return pair if self.calibration is None else self._calibrated(pair)

  def _calibrated(self, pair: TargetDraftPair) -> TargetDraftPair:
    """Returns the pair with fitted efficiencies and overheads."""
    calibration, name = self.calibration, None
    target = calibration.place(self.target, pair.target)
    draft = deployment_of(target, self.cost)
    last = self.drafter_calls[-1]
    if self.draft_name is not None:
      name = self.draft_name
    elif last.place is None and last.name == "early_exit":
      name = f"{self.target}, first {self.cost.exit_layer} layers"
    elif last.place is None and last.name == "layer_skip":
      name = f"{self.target}, {self.drafter}"
    if name is not None:  # its passes were timed
      draft = calibration.place(name, draft)
    overhead = {}
    if self.setting is not None:
      fit = calibration.overhead[self.setting]
      overhead = {"overhead": fit.ours, "baseline_overhead": fit.baseline}
    return dataclasses.replace(pair, target=target, draft=draft, **overhead)

  @property
  def setting(self) -> str | None:
    """The setting of the calibration whose overhead is used; None: none."""
    if self.calibration is None:
      return None
    names = [self.drafter, " | ".join(map(str, self.drafter_calls))]
    names += map(_old_name, self.drafter_calls[-1:])
    for name in names:
      for setting in self.calibration.overhead:
        if setting.startswith(f"{self.target}, {name}, "):
          return setting
    return None


def _check_threshold(call: Call) -> None:
  """Raises ValueError where layer_skip(...) decides how much it drafts."""
  file = call.args[0] if call.args else call.kwargs.get("file")
  skip = dict(call.kwargs) if file is None else catalog.read_skip(file)
  if skip.get("threshold") is not None or "threshold" in call.kwargs:
    lists = (
      f"{name}={list(skip.get(name, ()))}" for name in ("attention", "mlp")
    )
    raise ValueError(
      f"{call} ends drafts at a threshold, and rounds of one length are "
      f"priced: give layer_skip({', '.join(lists)})"
    )


def _is_model(call: Call) -> bool:
  return call.name == "model" and call.place is None


def _name(call: Call) -> str:
  """Returns what model(...) names, a share as text.

  Raises:
    ValueError: it has other arguments.
  """

  def model(name):
    return str(name)

  return calls.invoke(call, model, {})


def _old_name(call: Call) -> str:
  """Returns how version 0.1.0 named a drafter in calibrations."""
  if call.args and call.name == "early_exit":
    return f"exit after {call.args[0]}"
  return str(call.args[0]) if call.args else call.name


def _config(name: str, dtype: str) -> TransformerConfig | None:
  """Returns a model's config; None for a shape without one.

  Raises:
    ValueError: there is no such model.
  """
  bare = name.removeprefix(catalog.PRESET)
  if bare in presets.names():
    return presets.get(bare, dtype)
  if name in shapes.names():
    return None
  try:
    return checkpoints.inspect(fetch(name), dtype)
  except (OSError, ValueError) as error:
    raise ValueError(
      f"no model {name!r} ({error}); shapes: {choices(name, shapes.names())}"
    ) from None
