"""What a prediction is about: a target and a drafter on chips, by name.

Scenario.of("llama3-70b", "model(llama3-1b)", chips.get("v6e"), ways=8).pair
"""

import dataclasses
import functools

from specdec.benchmark import abstract, catalog, deployments
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import PRESET, config_of, source_of
from specdec.drafters.heads.cost import shared_out
from specdec.models import presets, weight_formats
from specdec.models.config import TransformerConfig
from specdec.models.weight_formats import STORED
from specdec.roofline import drafter_cost, shapes
from specdec.roofline.calibration import Calibration
from specdec.roofline.chips import Chip
from specdec.roofline.cost import BYTES, TYPICAL, Deployment
from specdec.roofline.round_cost import TargetDraftPair, deployment_of
from specdec.types import DrafterCost
from specdec.utils import calls
from specdec.utils.calls import Call
from specdec.utils.spelling import choices


@dataclasses.dataclass(frozen=True)
class Scenario:
  """A target and a drafter on chips."""

  target: str  # of shapes.names(), preset:NAME, or a checkpoint
  # A call, or two with | between them; model(0.03) is a draft model with that
  # share of the target's weights.
  drafter: str
  deployment: Deployment  # of the target; drafts have its chips and dtypes
  # Chips that share out the draft's weights; None: as many as the target's, 1
  # where they do not divide a trained head.
  draft_ways: int | None = None
  most: int = 8  # largest k
  calibration: Calibration | None = None  # of the machine that the chip is

  def __post_init__(self):
    first, *others = self.drafter_calls
    if len(others) > 1:
      raise ValueError(f"{self.drafter}: at most two drafters, with one |")
    if not others and "k" in first.kwargs:
      raise ValueError(
        f"{self.drafter}: every k up to most = {self.most} is priced; leave k "
        "out"
      )
    if self.draft_ways is not None and not (self._has_head or self.draft_name):
      raise ValueError(
        "draft_ways is for a draft model or a trained head, and "
        f"{self.drafter} is none"
      )
    layers = self.deployment.shape.layers
    if self.deployment.source and not any(x.source_kv for x in layers):
      raise ValueError(f"source: {self.target} has no cross-attention")

  @classmethod
  def of(
    cls,
    target: str,
    drafter: str,
    chip: Chip,
    *,
    draft_ways: int | None = None,
    most: int = 8,
    calibration: Calibration | None = None,
    **deployment,
  ) -> "Scenario":
    """Returns a scenario with the target's Deployment on `chip`."""
    deployment = {"efficiency": TYPICAL} | deployment
    weights = deployment.get("weights", "bfloat16")
    deployed = Deployment(_shape_of(target, weights), chip, **deployment)
    return cls(target, drafter, deployed, draft_ways, most, calibration)

  def on(self, chip: Chip) -> "Scenario":
    """Returns the same on another chip, not calibrated."""
    deployment = dataclasses.replace(self.deployment, chip=chip)
    return dataclasses.replace(self, deployment=deployment, calibration=None)

  @functools.cached_property
  def drafter_calls(self) -> list[Call]:
    """The drafter's calls, parsed."""
    return calls.parse_all(self.drafter)

  @property
  def _has_head(self) -> bool:
    return any(_is(call, *catalog.HEADS) for call in self.drafter_calls)

  @property
  def draft_name(self) -> str | None:
    """The draft model's name; None: another drafter drafts."""
    models = [call for call in self.drafter_calls if _is(call, "model", "pard")]
    return catalog.arguments_of(models[-1])["name"] if models else None

  @property
  def num_chips(self) -> int:
    """Chips of all replicas."""
    return self.deployment.ways * self.deployment.replicas

  def shape_of(self, name: str) -> shapes.Shape:
    """Returns a model's shape, or that of a share of the target."""
    return _shape_of(name, self.deployment.weights, self.deployment.shape)

  @functools.cached_property
  def cost(self) -> DrafterCost:
    """What the drafter holds and reads; one without a cost is refused."""
    for call in self.drafter_calls:
      if _is(call, "none"):
        raise ValueError("none drafts nothing; drafts of lookup cost nothing")
      if _is(call, "layer_skip"):
        _check_threshold(call)
    if self.draft_name is None:
      together = self._built(self.drafter)  # refuses what cannot be a pair
      if len(self.drafter_calls) == 1 or not self._has_head:
        return together
    costs = []
    # Their k is a matter of rounds.
    for call in map(catalog.without_k, self.drafter_calls):
      if _is(call, "model", "pard"):
        costs.append(self._of_model(call))
      else:
        costs.append(self._built(str(call)))
    return functools.reduce(drafter_cost.fallback, costs)

  def _of_model(self, call: Call) -> DrafterCost:
    """Returns the cost of a draft model, held as its call says."""
    arguments = catalog.arguments_of(call)
    shape = self.shape_of(arguments["name"])
    form = weight_formats.parse(arguments["weights"])
    if form and form.kind != STORED:
      shape = dataclasses.replace(shape, weight_size=form.weight_size)
    shape = dataclasses.replace(shape, kv=arguments["kv"] or shape.kv)
    return getattr(drafter_cost, call.name)(shape, self.deployment.weights)

  def _built(self, drafter: str) -> DrafterCost:
    """Returns the cost of drafters as a Setup constructs them."""
    weights, name = self.deployment.weights, self.target
    dtype = _dtype(weights)
    if name in presets.names():
      name = PRESET + name
    setup = Setup(name, drafter, k=self.most, dtype=dtype, random_weights=True)
    built = abstract.target(setup)
    cost = abstract.drafter(setup, built).drafter.cost
    if cost is None or not cost.is_complete:
      raise ValueError(
        f"{drafter} has no cost: its Drafter does not say what it holds and "
        "reads (docs/extending.md)"
      )
    # Of the target's weights a head reads what the target itself would.
    size = BYTES[weights] / BYTES[dtype] * cost.step.target_bytes
    step = cost.step._replace(target_bytes=size)
    cost = dataclasses.replace(cost, step=step)
    if not setup.has_heads:
      return cost
    config, most = built.checkpoint.config, self.deployment.ways
    if (self.draft_ways or 1) > most:
      raise ValueError(
        f"draft_ways = {self.draft_ways}; it must be in 1..{most}, the "
        "target's ways"
      )
    on_mesh = dict(mesh=f"model:{most}", draft_ways=self.draft_ways)
    setup = dataclasses.replace(setup, **on_mesh)
    ways = setup.head_ways(config, most)
    return shared_out(cost, setup.head_config(config), config, ways)

  @functools.cached_property
  def pair(self) -> TargetDraftPair:
    """Target and drafter as the cost model takes them."""
    target, cost, calibration = self.deployment, self.cost, self.calibration
    if cost.exit_layer >= len(target.shape.layers):
      raise ValueError(
        f"{self.drafter}: {self.target} has {len(target.shape.layers)} layers; "
        "an exit is after fewer"
      )
    if calibration is not None:
      target = calibration.place(self.target, target)
    draft, name = deployment_of(target, cost), self.draft_name
    if name is not None:
      draft = dataclasses.replace(draft, ways=self.draft_ways or target.ways)
    elif _is(self.drafter_calls[-1], "early_exit"):
      name = f"{self.target}, first {cost.exit_layer} layers"
    elif _is(self.drafter_calls[-1], "layer_skip"):
      call = self.drafter_calls[-1]
      name = f"{self.target}, {deployments.calls_name([call])}"
    if calibration is not None and name is not None:  # its passes were timed
      draft = calibration.place(name, draft)
    if self.setting is None:
      return TargetDraftPair(target, cost, draft)
    fit = calibration.overhead[self.setting]
    return TargetDraftPair(target, cost, draft, fit.ours, fit.baseline)

  @property
  def setting(self) -> str | None:
    """The setting of the calibration whose overhead is used; None: none."""
    if self.calibration is None:
      return None
    names = [self.drafter, " | ".join(map(str, self.drafter_calls))]
    names.append(deployments.calls_name(self.drafter_calls))
    last = self.drafter_calls[-1]
    old = str(last.args[0]) if last.args else last.name  # of version 0.1.0
    names.append(f"exit after {old}" if last.name == "early_exit" else old)
    starts = tuple(f"{self.target}, {name}, " for name in names)
    overhead = self.calibration.overhead
    matches = (x for start in starts for x in overhead if x.startswith(start))
    return next(matches, None)


def _is(call: Call, *names: str) -> bool:
  """Whether a call names one of these drafters of ours."""
  return call.place is None and call.name in names


def _check_threshold(call: Call) -> None:
  """Raises ValueError where layer_skip(...) decides how much it drafts."""
  if catalog.arguments_of(call)["threshold"] is not None:
    layers = deployments.skip_of(call)._asdict().items()
    lists = ", ".join(f"{name}={list(numbers)}" for name, numbers in layers)
    raise ValueError(
      f"{call} ends drafts at a threshold, and rounds of one length are "
      f"priced: give layer_skip({lists})"
    )


def _dtype(weights: str) -> str:
  return "float32" if weights == "float32" else "bfloat16"


def _shape_of(
  name: str, weights: str, whole: shapes.Shape | None = None
) -> shapes.Shape:
  """Returns a model's shape, or that of a share of `whole`."""
  if name in shapes.names():
    return shapes.get(name)
  try:
    share = float(name)
  except ValueError:
    return shapes.of_config(_config(name, weights), name)
  if whole is None:
    raise ValueError(
      f"target {name} is a share of itself; give a checkpoint or one of "
      f"{', '.join(shapes.names())}"
    )
  return shapes.scaled(whole, share)


def _config(name: str, weights: str) -> TransformerConfig:
  """Returns a model's config."""
  try:
    return config_of(source_of(name), _dtype(weights))
  except (OSError, ValueError) as error:
    raise ValueError(
      f"no model {name!r} ({error}); shapes: {choices(name, shapes.names())}"
    ) from None
