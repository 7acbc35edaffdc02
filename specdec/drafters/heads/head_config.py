"""The configuration of a trained head: kind, shape and vocabulary.

The target's hidden states go in, draft tokens come out; how is in the kind's
file.
"""

import dataclasses
from typing import NamedTuple

from specdec.models.config import TransformerConfig

HEADS = ("own", "shared")


class Kind(NamedTuple):
  """What the heads of a kind have in common.

  Attributes:
    num_layers: of its own that it needs at least; None: it has none, but a head
      for each level.
    heads: those of HEADS that it may have.
    reads_features: it reads streams entering layers of the target.
    exits: it runs the target's first layers.
    resets: its KV cache is empty at the start of every round.
    predicts_hidden: it predicts the target's hidden states.
  """

  num_layers: int | None = 1
  heads: tuple[str, ...] = HEADS
  reads_features: bool = False
  exits: bool = False
  resets: bool = False
  predicts_hidden: bool = False


KINDS = {
  "eagle": Kind(heads=("shared",), predicts_hidden=True),
  "eagle3": Kind(reads_features=True),
  "exit": Kind(num_layers=0, exits=True),
  "hydra": Kind(num_layers=None),
  "medusa": Kind(num_layers=None),
  "mtp": Kind(),
  "prophet": Kind(resets=True),
}
_MOST = 1024  # layers, or levels: what a loop is made over


@dataclasses.dataclass(frozen=True)
class HeadConfig:
  """One trained head.

  Attributes:
    kind: one of KINDS.
    width: W, of its own residual stream.
    mlp_width, num_heads, num_kv_heads, head_dim: of its decoder layers.
    num_layers: decoder layers of its own; Medusa and Hydra have none.
    levels: draft tokens in a row that it is trained for. Medusa and Hydra have
      a head for each and can draft no more; the others may go on.
    head: 'own', a vocabulary projection [n, W] of its own, or 'shared', the
      target's rows behind a map from W to the target's width.
    vocabulary: n, how many tokens it can draft, the most frequent ones;
      0: all.
    features: EAGLE-3: layers of the target whose entering streams it reads.
    exit_layer: exit: E, how many of the target's layers draft.
    feeds_back_hidden: exit: the target's last hidden state of the round before
      is an input.
    norm_epsilon, rope_theta: as in TransformerConfig.
  """

  kind: str
  width: int = 128
  mlp_width: int = 384
  num_heads: int = 4
  num_kv_heads: int = 1
  head_dim: int = 32
  num_layers: int = 1
  levels: int = 4
  head: str = "own"
  vocabulary: int = 0
  features: tuple[int, ...] = ()
  exit_layer: int = 0
  feeds_back_hidden: bool = False
  norm_epsilon: float = 1e-5
  rope_theta: float = 10_000.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      _check_type(field, getattr(self, field.name))
    for name in ("num_layers", "levels"):
      if getattr(self, name) > _MOST:
        raise ValueError(f"{name} = {getattr(self, name)}; at most {_MOST}")
    if self.kind not in KINDS:
      raise ValueError(
        f"kind {self.kind!r} is unknown; known: {', '.join(KINDS)}"
      )
    if self.head not in HEADS:
      raise ValueError(
        f"head {self.head!r} is unknown; known: {', '.join(HEADS)}"
      )
    if self.levels < 1:
      raise ValueError(f"levels = {self.levels}; it must be >= 1")
    if self.vocabulary < 0:
      raise ValueError(f"vocabulary = {self.vocabulary}; it must be >= 0")
    least = self._kind.num_layers
    if least is None and self.num_layers:
      raise ValueError(f"{self.kind} has no layers; num_layers must be 0")
    if self.num_layers < (least or 0):
      raise ValueError(f"num_layers = {self.num_layers} of {self.kind}")
    if self._kind.reads_features and not self.features:
      raise ValueError(f"{self.kind} needs features, the layers that it reads")
    if self.features and not self._kind.reads_features:
      raise ValueError(
        f"features = {self.features}: {self.kind} reads no layers"
      )
    if self.exits != bool(self.exit_layer):
      raise ValueError(
        f"exit_layer = {self.exit_layer} of {self.kind}: an exit needs a layer "
        "above 0, and nothing else has one"
      )
    if self.feeds_back_hidden and not self.exits:
      raise ValueError(f"recycle belongs to an exit, not to {self.kind}")
    if self.head not in self._kind.heads:
      raise ValueError(
        f"head = {self.head!r} of {self.kind}; it must be "
        f"{' or '.join(map(repr, self._kind.heads))}"
      )
    self.layers  # noqa: B018  (checks the shape)

  @property
  def _kind(self) -> Kind:
    return KINDS[self.kind]

  @property
  def exits(self) -> bool:
    """Whether it runs the target's first layers."""
    return self._kind.exits

  @property
  def predicts_hidden(self) -> bool:
    """Whether it predicts the target's hidden states."""
    return self._kind.predicts_hidden

  @property
  def resets_each_round(self) -> bool:
    """Whether its KV cache is empty at the start of every round."""
    return self._kind.resets

  @property
  def most_levels(self) -> int | None:
    """Deepest draft token it can draft; None: any."""
    return self.levels if self._kind.num_layers is None else None

  @property
  def layers(self) -> TransformerConfig:
    """Its decoder layers, as a decoder's config; it has no such vocabulary."""
    return TransformerConfig(
      vocab_size=1,
      num_layers=max(self.num_layers, 1),
      width=self.width,
      mlp_width=self.mlp_width,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      norm_epsilon=self.norm_epsilon,
      rope_theta=self.rope_theta,
    )

  def check(self, target: TransformerConfig) -> None:
    """Refuses a target that it cannot draft for.

    Raises:
      ValueError: it reads layers that the target does not have, or its
        vocabulary is larger.
    """
    count = target.num_layers
    absent = [i for i in self.features if not 0 <= i <= count]
    if absent:
      raise ValueError(
        f"features asks for layers {', '.join(map(str, absent))}; this target "
        f"has {count}, so entering streams 0..{count}"
      )
    if self.exits and not 1 <= self.exit_layer < count:
      raise ValueError(
        f"exit_layer = {self.exit_layer}; this target has {count} layers, so "
        f"it must be in 1..{count - 1}"
      )
    if self.vocabulary > target.vocab_size:
      raise ValueError(
        f"vocabulary = {self.vocabulary}; the target has {target.vocab_size} "
        "tokens"
      )


def _check_type(field: dataclasses.Field, value) -> None:
  """Refuses what may have been read from a damaged file."""
  kind = field.type
  whole = lambda x: type(x) is int and abs(x) < 2**31  # noqa: E731
  if kind is int:
    right, words = whole(value), "an integer below 2**31"
  elif kind is float:
    right = whole(value) or (type(value) is float and abs(value) < 1e38)
    words = "a number below 1e38"
  elif kind in (str, bool):
    right, words = isinstance(value, kind), f"a {kind.__name__}"
  else:
    right = isinstance(value, tuple) and all(map(whole, value))
    words = "integers"
  if not right:
    raise ValueError(f"{field.name} = {value!r:.60}; it must be {words}")
