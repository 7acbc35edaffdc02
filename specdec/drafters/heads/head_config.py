"""The configuration of a trained head: kind, shape and vocabulary.

The target's hidden states go in, draft tokens come out; how is in the kind's
file.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_kinds import HEADS, KINDS, Kind
from specdec.models import config, rope_scaling
from specdec.models.config import TransformerConfig
from specdec.models.rope_scaling import RopeScaling, Yarn
from specdec.utils import kinds
from specdec.utils.spelling import check_choice

# Fields of its layers, as in TransformerConfig.
OF_LAYERS = (
  *("width", "mlp_width", "num_heads", "num_kv_heads", "head_dim"),
  *("norm_epsilon", "rope_theta", "rope_scaling", "qkv_bias", "qk_norm"),
  "norm_offset",
)
LAYOUTS = ("compact", "published")
FEATURE_NORMS = ("none", "each", "joint")
_MOST = 1024  # layers, or levels: what a loop is made over


@dataclasses.dataclass(frozen=True)
class HeadConfig:
  """One trained head.

  Attributes:
    kind: one of KINDS.
    width: W, of its own residual stream.
    mlp_width, num_heads, num_kv_heads, head_dim: of its decoder layers.
    num_layers: decoder layers of its own; Medusa, Hydra, MLP speculators and
      ReDrafter have none.
    levels: draft tokens in a row that it is trained for. Medusa, Hydra and MLP
      speculators have a head for each, blocks a slot, and can draft no more;
      the others may go on.
    head: 'own', a vocabulary projection [n, W] of its own, or 'shared', the
      target's rows behind a map from W to the target's width.
    vocabulary: n, how many tokens it can draft, the most frequent ones;
      0: all.
    features: EAGLE-3 and blocks: layers of the target whose entering streams it
      reads.
    exit_layer: exit: E, how many of the target's layers draft.
    mask_token: P-EAGLE: whose embedding stands for tokens that are not drawn
      yet; -1: a vector of its own.
    feeds_back_hidden: exit: the target's last hidden state of the round before
      is an input.
    norm_epsilon, rope_theta: as in TransformerConfig.
    layout: 'compact', of any width, in few weights; 'published', the shapes of
      the papers' code, so that checkpoints load and can be served elsewhere.
      Of the published layout alone are, of the kinds in KINDS:
    embed: 'own', an embedding of its own, or 'shared', the target's.
    bias: EAGLE: of the map that fuses embedding and hidden state.
    feature_norm: EAGLE-3, P-EAGLE: 'each' stream passes a norm before they are
      fused (EAGLE 3.1), all as one ('joint', gpt-oss), or 'none' (the paper).
    norm_before_residual: EAGLE-3: the residual stream of its first layer
      starts from the normed hidden state.
    feeds_back_norm: EAGLE-3 and MTP: the next draft token is given the hidden
      state after the final norm, not before it.
    hidden_first: MTP: the hidden state is ahead of the embedding where the two
      are fused (MiMo).
    norm_offset: MTP: as in TransformerConfig (Qwen3-Next).
    residual_layers: Medusa and ReDrafter: residual blocks of a head.
    rnn: ReDrafter: its state passes a recurrent layer, or only sums up.
    tied: MLP speculator: all draft tokens have the same weights, but for the
      first projection.
    scale_input: MLP speculator: it reads a normalized hidden state.
    qkv_bias, qk_norm, rope_scaling: of its layers, as in TransformerConfig;
      layers of a block have norms of queries and keys without being asked.
    layer: MTP: its decoder layer, where the fields above do not say all of it:
      a mixture of experts, latent attention, gates; None: they do.
    block: options of a block drafter alone.
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
  mask_token: int = -1
  feeds_back_hidden: bool = False
  norm_epsilon: float = 1e-5
  rope_theta: float = 10_000.0
  layout: str = "compact"
  embed: str = "shared"
  bias: bool = False
  feature_norm: str = "none"
  norm_before_residual: bool = False
  feeds_back_norm: bool = False
  hidden_first: bool = False
  norm_offset: bool = False
  residual_layers: int = 1
  tied: bool = False
  scale_input: bool = False
  rnn: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  rope_scaling: RopeScaling | Yarn | None = None
  block: BlockConfig | None = None
  layer: TransformerConfig | None = None

  def __post_init__(self):
    if isinstance(self.rope_scaling, Mapping):  # of a file or a ConfigDict
      scaling = rope_scaling.from_fields(self.rope_scaling)
      object.__setattr__(self, "rope_scaling", scaling)
    if isinstance(self.layer, Mapping):
      object.__setattr__(self, "layer", config.from_fields(self.layer))
    if isinstance(self.block, Mapping):
      object.__setattr__(self, "block", BlockConfig(**self.block))
    elif self.block is None and self.kind == "block":
      object.__setattr__(self, "block", BlockConfig())
    if isinstance(self.features, list):
      object.__setattr__(self, "features", tuple(self.features))
    for field in dataclasses.fields(self):
      kinds.check(field.name, getattr(self, field.name), field.type)
    for name in ("norm_epsilon", "rope_theta"):
      if getattr(self, name) > 1e38:  # in float32 it would be infinite
        raise ValueError(f"{name} = {getattr(self, name)}; at most 1e38")
    for name in ("num_layers", "levels", "residual_layers"):
      if getattr(self, name) > _MOST:
        raise ValueError(f"{name} = {getattr(self, name)}; at most {_MOST}")
    check_choice("kind", self.kind, KINDS)
    check_choice("head", self.head, HEADS)
    check_choice("embed", self.embed, HEADS)
    check_choice("feature_norm", self.feature_norm, FEATURE_NORMS)
    self._check_layout()
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
      raise ValueError(
        f"feeds_back_hidden belongs to an exit, not to {self.kind}"
      )
    if self.block and self.kind != "block":
      raise ValueError(f"block belongs to a block drafter, not to {self.kind}")
    full = self.block.full_layers if self.block else ()
    if not {*full} <= {*range(self.num_layers)}:
      raise ValueError(
        f"block.full_layers = {full}; its layers are 0..{self.num_layers - 1}"
      )
    if self.mask_token < -1 or (self.mask_token >= 0 and not self.parallel):
      raise ValueError(
        f"mask_token = {self.mask_token} of {self.kind}: a token's id, or -1; "
        "only peagle has masks"
      )
    if self.block and self.block.taps and self.width % self.block.group:
      raise ValueError(
        f"block.group = {self.block.group} does not divide width = {self.width}"
      )
    if self.head not in self._kind.heads:
      raise ValueError(
        f"head = {self.head!r} of {self.kind}; it must be "
        f"{' or '.join(map(repr, self._kind.heads))}"
      )
    self._check_layer()
    self.layers  # noqa: B018  (checks the shape)

  def _check_layer(self) -> None:
    """Refuses a layer that the other fields contradict, or that cannot run."""
    if self.layer is None:
      return
    for name in OF_LAYERS:
      theirs, ours = getattr(self.layer, name), getattr(self, name)
      if theirs != ours:
        raise ValueError(f"{name} = {ours}, and layer.{name} = {theirs}")
    names = "windows", "unrotated_layers", "dense_layers", "recurrence"
    names += "encoder_layers", "relative_buckets", "weights", "kv"
    if given := [name for name in names if getattr(self.layer, name)]:
      raise ValueError(f"layers of a head have no {', '.join(given)}")

  def _check_layout(self) -> None:
    """Refuses options that the layout of this kind does not have."""
    check_choice("layout", self.layout, LAYOUTS)
    options = self._kind.published
    if self.is_published and options is None:
      kinds = [name for name in KINDS if KINDS[name].published is not None]
      raise ValueError(
        f"layout = 'published' of {self.kind}: there is none but of "
        f"{', '.join(kinds)}"
      )
    if not self.is_published and not self._kind.compact:
      raise ValueError(
        f"layout = {self.layout!r} of {self.kind}: there is none"
      )
    allowed = options if self.is_published else ()
    for name in _PUBLISHED:
      default = getattr(HeadConfig, name)
      if getattr(self, name) != default and name not in allowed:
        raise ValueError(
          f"{name} = {getattr(self, name)!r:.60} of {self.kind} with layout = "
          f"{self.layout!r}; it must be {default!r}"
        )
    if self.block and self.is_published and self.block.mask_token < 0:
      raise ValueError(
        f"block.mask_token = {self.block.mask_token} with layout = "
        "'published': published blocks begin with a token of the target, >= 0"
      )
    if self.residual_layers < 1:
      raise ValueError(
        f"residual_layers = {self.residual_layers}; it must be >= 1"
      )

  @property
  def is_published(self) -> bool:
    """Whether its shapes are those of the papers' code."""
    return self.layout == "published"

  @property
  def skips_first(self) -> bool:
    """Whether its KV cache leaves out the first token, which follows none."""
    return self.is_published and self.num_layers > 0 and not self.block

  @property
  def _kind(self) -> Kind:
    return KINDS[self.kind]

  @property
  def exits(self) -> bool:
    """Whether it runs the target's first layers."""
    return self._kind.exits

  @property
  def streams(self) -> tuple[int, ...]:
    """Layers of the target whose entering streams it reads."""
    return (self.exit_layer,) if self.exits else self.features

  @property
  def block_size(self) -> int:
    """Slots of a block that drafts all of its levels."""
    return self.levels + self.block.offset

  @property
  def parallel(self) -> bool:
    """Whether masks stand for tokens not drawn yet: one pass for all levels."""
    return self._kind.parallel

  @property
  def resets_each_round(self) -> bool:
    """Whether its KV cache is empty at the start of every round."""
    return self._kind.resets

  @property
  def most_levels(self) -> int | None:
    """Deepest draft token it can draft; None: any."""
    return self.levels if self._kind.by_level else None

  def check_levels(self, depth: int) -> None:
    """Refuses drafts that are deeper than it can draft."""
    most = self.most_levels
    if most is not None and depth > most:
      has = f"slots for {most}" if self.block else f"{most} heads, one a level"
      raise ValueError(
        f"{depth} levels of draft tokens; this {self.kind} has {has}"
      )

  @property
  def layers(self) -> TransformerConfig:
    """Its decoder layers, as a decoder's config; it has no such vocabulary."""
    if self.layer is not None:
      return dataclasses.replace(self.layer, num_layers=max(self.num_layers, 1))
    fields = {name: getattr(self, name) for name in OF_LAYERS}
    fields["qk_norm"] |= bool(self.block)
    return TransformerConfig(
      vocab_size=1, num_layers=max(self.num_layers, 1), **fields
    )

  @property
  def counts(self) -> dict[str, int]:
    """What chips that share out its weights are to divide, as of a decoder;
    matrices outside of its layers are split where that is possible."""
    counts = self.layers.counts | {"vocab": 0}
    return counts if self.num_layers else dict.fromkeys(counts, 0)

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
    self._check_width(target.width)
    if self.vocabulary > target.vocab_size:
      raise ValueError(
        f"vocabulary = {self.vocabulary}; the target has {target.vocab_size} "
        "tokens"
      )
    if self.mask_token >= target.vocab_size:
      raise ValueError(
        f"mask_token = {self.mask_token}; the target has {target.vocab_size} "
        "tokens"
      )
    if self.block and self.block.mask_token >= target.vocab_size:
      raise ValueError(
        f"block.mask_token = {self.block.mask_token}; the target has "
        f"{target.vocab_size} tokens"
      )

  def check_ids(self, ids: Sequence[int] | None) -> None:
    """Refuses another number of tokens than `vocabulary`; None are all."""
    if (0 if ids is None else len(ids)) != self.vocabulary:
      raise ValueError(
        f"the head config says vocabulary = {self.vocabulary}, and "
        f"{'none' if ids is None else len(ids)} are given"
      )

  def _check_width(self, width: int) -> None:
    """Refuses a target of another width where the published layout has one."""
    own = self.kind in ("eagle3", "peagle") and self.embed == self.head == "own"
    free = own or self.kind in ("mlp_speculator", "redrafter")
    if self.is_published and not free and self.width != width:
      raise ValueError(
        f"width = {self.width}: {self.kind} with layout = 'published' has the "
        f"target's width, {width}"
      )


_PUBLISHED = sorted(
  {x for kind in KINDS.values() for x in kind.published or ()}
)
