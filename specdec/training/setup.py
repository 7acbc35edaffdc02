"""Setups of training: what is trained, on what, and how.

Each is made of a config, a nested dict, whose every entry is checked before
anything is loaded.
"""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig, check_limits
from specdec.sampling import HOTTEST
from specdec.training import draft_losses, joint
from specdec.training.draft_losses import Loss
from specdec.training.joint import LayerSkip
from specdec.training.masked import Masks
from specdec.training.options import Options, check_range
from specdec.utils import kinds
from specdec.utils.spelling import naming

_MOST_NEW = 2**16  # tokens after a prompt; training waits for them


@dataclasses.dataclass(frozen=True)
class Decoding:
  """How a drafter is evaluated: by completing held-out texts."""

  k: int  # draft tokens in a round
  prompts: int  # how many, evenly spaced in the held-out text
  length: int  # tokens of each prompt
  new_tokens: int  # to generate after each
  temperature: float  # of sampling; 0 is greedy
  exit_layer: int | None = None  # LayerSkip: how many target layers draft

  def __post_init__(self):
    for name in ("k", "prompts", "length"):
      check_range(self, name, 1, prefix="decoding.")
    check_range(self, "new_tokens", 1, _MOST_NEW, prefix="decoding.")
    check_range(self, "temperature", 0, HOTTEST, prefix="decoding.")


@dataclasses.dataclass(frozen=True)
class Samples:
  """Texts of the target's, to train on instead of the data."""

  count: int  # of texts; 0: train on the data itself
  prompt: int  # tokens of the data that each begins with
  temperature: float  # of sampling

  def __post_init__(self):
    check_range(self, "count", 0, prefix="samples.")
    check_range(self, "prompt", 1, prefix="samples.")
    check_range(self, "temperature", 0, HOTTEST, prefix="samples.")


@dataclasses.dataclass(frozen=True)
class ModelSetup:
  """A language model trained on text, or distilled from a target."""

  tokenizer: str  # a checkpoint's, named like --target
  data: str  # texts to train on
  held_out: str  # texts to evaluate on
  model: TransformerConfig
  options: Options
  start: str | None = None  # checkpoint with initial weights; '': random ones
  target: str | None = None  # checkpoint to distil from; '': there is none
  loss: str | None = None  # of distillation; see training/objective.py
  samples: Samples | None = None
  decoding: Decoding | None = None
  masks: Masks | None = None  # of a draft that is taught to draft in one pass

  def __post_init__(self):
    _check_trainable(self.model)
    if self.masks and (self.model.mask_token is None or not self.target):
      raise ValueError(
        "masks are for a draft with a mask token and a target: set "
        "model.mask_token and target"
      )
    if self.masks and self.model.encoder_layers:
      raise ValueError("masks are for decoders alone, without encoder_layers")
    if self.masks:
      _check_sequence(self.options, "masks.levels", self.masks.levels)
    if bool(self.model.encoder_layers) != bool(self.options.source):
      raise ValueError(
        f"model.encoder_layers = {self.model.encoder_layers} and "
        f"options.source = {self.options.source}: an encoder needs the length "
        "of its sources, and a decoder alone has none"
      )
    if self.model.encoder_layers and self.samples and self.samples.count:
      raise ValueError(
        f"samples.count = {self.samples.count}: the texts of an "
        "encoder-decoder are not sampled from its target; set 0"
      )
    if self.target:
      _require(self, "decoding", "loss")
    elif self.loss not in (None, "cross_entropy"):
      raise ValueError(f"loss = {self.loss!r} needs a target")
    elif self.samples and self.samples.count:
      raise ValueError(f"samples.count = {self.samples.count} needs a target")


@dataclasses.dataclass(frozen=True)
class HeadSetup:
  """A draft head trained on the hidden states of a frozen target."""

  target: str  # checkpoint, named like --target
  data: str  # texts to train on
  held_out: str  # texts to evaluate on
  head_config: HeadConfig
  loss: Loss
  options: Options
  decoding: Decoding
  samples: Samples | None = None
  start: str | None = None  # drafter that it begins as; '': random weights
  cache: str | None = None  # folder of hidden states; '': recomputes them

  def __post_init__(self):
    if self.options.source:
      raise ValueError(
        f"options.source = {self.options.source}: draft heads learn from "
        "decoders alone, which have no source"
      )
    _check_head(self.options, self.head_config, self.loss)
    with naming(f"decoding.k = {self.decoding.k}"):
      self.head_config.check_levels(self.decoding.k)


@dataclasses.dataclass(frozen=True)
class JointSetup:
  """A target trained from scratch, with or without an auxiliary loss.

  That is the `loss` of a drafter of this `head_config`, or `layer_skip`.
  """

  tokenizer: str  # a checkpoint's, named like --target
  data: str  # texts to train on
  held_out: str  # texts to evaluate on
  model: TransformerConfig
  options: Options
  head_config: HeadConfig | None = None
  loss: Loss | None = None
  layer_skip: LayerSkip | None = None
  decoding: Decoding | None = None

  def __post_init__(self):
    _check_trainable(self.model)
    if self.model.encoder_layers or self.options.source:
      raise ValueError(
        f"model.encoder_layers = {self.model.encoder_layers}, options.source = "
        f"{self.options.source}: a target of joint training is a decoder"
      )
    if self.head_config and self.layer_skip:
      raise ValueError(
        "the config sets head_config and layer_skip; take one of them"
      )
    if self.loss and not self.head_config:
      raise ValueError("the config sets loss, and no head_config to train")
    if self.head_config:
      _require(self, "decoding", "loss")
      self.head_config.check(self.model)
      joint.check(self.head_config, self.loss)
      _check_head(self.options, self.head_config, self.loss)
    elif self.layer_skip:
      _require(self, "decoding")
      if self.decoding.exit_layer is None:
        raise ValueError("the config lacks decoding.exit_layer")

  @property
  def kind(self) -> str:
    """Kind of the auxiliary loss; 'none' without one."""
    if self.head_config:
      return self.head_config.kind
    return "layerskip" if self.layer_skip else "none"


def from_config(
  config: Mapping[str, Any],
) -> ModelSetup | HeadSetup | JointSetup:
  """Makes the setup that nested dicts describe.

  A `head_config` without a `model` is a HeadSetup. A `model` with an entry
  `head_config` or `layer_skip`, though it be None, is a JointSetup.

  Raises:
    ValueError: an entry is unknown, missing or out of range.
  """
  kind = ModelSetup
  if {"head_config", "layer_skip"} & set(config):
    kind = JointSetup if "model" in config else HeadSetup
  try:
    return _build(kind, config, "")
  except TypeError as error:  # a comparison with something of another type
    raise ValueError(f"the config cannot be used: {error}") from error


def _build(cls: type, config: Mapping[str, Any], prefix: str):
  """Makes a dataclass, and those that are its fields, of nested dicts.

  Args:
    prefix: of the names of entries in errors: 'decoding.'.
  """
  fields = {field.name: field for field in dataclasses.fields(cls)}
  unknown = [prefix + name for name in sorted(set(config) - set(fields))]
  if unknown:
    raise ValueError(
      f"the config sets {', '.join(unknown)}; accepted: {', '.join(fields)}"
    )
  required = {
    name for name, x in fields.items() if x.default is dataclasses.MISSING
  }
  _refuse_absent([x for x in required if config.get(x) is None], prefix)
  hints = typing.get_type_hints(cls)
  values = {}
  for name, value in config.items():
    options = kinds.alternatives(hints[name])
    nested = [kind for kind in options if dataclasses.is_dataclass(kind)]
    if nested and isinstance(value, Mapping):
      # An optional part that is empty is left out.
      empty = name not in required and not value
      value = None if empty else _build(nested[0], value, f"{prefix}{name}.")
    elif typing.get_origin(hints[name]) is tuple and isinstance(value, list):
      value = tuple(value)
    kinds.check(prefix + name, value, hints[name])
    values[name] = value
  return cls(**values)


def _require(setup: ModelSetup | JointSetup, *names: str) -> None:
  _refuse_absent([name for name in names if not getattr(setup, name)])


def _refuse_absent(names: Collection[str], prefix: str = "") -> None:
  if names:
    absent = ", ".join(prefix + name for name in sorted(names))
    raise ValueError(f"the config lacks {absent}")


def _check_head(options: Options, head_config: HeadConfig, loss: Loss) -> None:
  """Raises ValueError for a loss or sequences that a head cannot learn by."""
  draft_losses.check(loss, head_config)
  least = head_config.levels + head_config.skips_first
  _check_sequence(options, "head_config.levels", least)


def _check_sequence(options: Options, name: str, least: int) -> None:
  """Raises ValueError unless a sequence has room for a draft of all levels."""
  if options.sequence < least:
    raise ValueError(
      f"options.sequence = {options.sequence}; a draft of {name} takes at "
      f"least {least} tokens"
    )


def _check_trainable(model: TransformerConfig) -> None:
  """Raises ValueError for a shape that is too large, or not in float32."""
  check_limits(model.num_layers, model.num_experts)
  if model.dtype != "float32":
    raise ValueError(
      f"model.dtype = {model.dtype!r}; weights are trained in float32, and "
      "options.dtype is that of the products"
    )
