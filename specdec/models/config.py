"""The shape of a decoder, as plain data: what cost models and loaders read.

Kept apart from the model's code so that `analysis` can price a model without
importing it (DESIGN: analysis imports model configs, never a model's code).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the trained context.

  Attributes:
    kind: 'linear' (all frequencies divided by `factor`) or 'llama3' (only the
      slow ones, with a smooth passage between; Llama 3.1 release notes).
    factor: the stretch.
    low_frequency_factor: 'llama3': wavelengths above
      original_length / low_frequency_factor are stretched fully.
    high_frequency_factor: 'llama3': wavelengths below
      original_length / high_frequency_factor are left alone.
    original_length: context length of the pre-training, in tokens.
  """

  kind: str
  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self):
    if self.kind not in ("linear", "llama3"):
      raise ValueError(
        f"rope scaling kind {self.kind!r} is unknown; known: linear, llama3"
      )


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """One decoder-only transformer of the Llama family.

  Attributes:
    vocab_size: V, rows of the embedding.
    num_layers: L.
    width: M, the residual stream.
    mlp_width: inner width of the gated MLP.
    num_heads: query heads.
    num_kv_heads: key/value heads; divides num_heads.
    head_dim: width of one head.
    norm_epsilon: added to the mean square inside RMSNorm.
    rope_theta: base of the rotary frequencies.
    rope_scaling: None, or how the frequencies are stretched.
    tied: the vocabulary projection is the embedding itself.
    windows: one entry a layer, None for full attention or the number of
      positions (itself included) that a token sees; () means all full.
    dtype: of activations, K/V and (as loaded) weights: 'float32' or
      'bfloat16'. Norms, softmax and logits are float32 whatever it says.
  """

  vocab_size: int
  num_layers: int
  width: int
  mlp_width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  norm_epsilon: float = 1e-5
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  tied: bool = False
  windows: tuple[int | None, ...] = ()
  dtype: str = "float32"

  def __post_init__(self):
    for name in (
      "vocab_size",
      "num_layers",
      "width",
      "mlp_width",
      "num_heads",
      "num_kv_heads",
      "head_dim",
    ):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 1")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
        f"{self.num_kv_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim = {self.head_dim}; rotary needs it even")
    if self.windows and len(self.windows) != self.num_layers:
      raise ValueError(
        f"windows has {len(self.windows)} entries for {self.num_layers} layers"
      )
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"dtype {self.dtype!r} is unknown; known: float32, bfloat16"
      )

  @property
  def num_parameters(self) -> int:
    """Weights, the tied embedding counted once."""
    attention = (
      self.width * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
    )
    layer = attention + 3 * self.width * self.mlp_width + 2 * self.width
    embeddings = self.vocab_size * self.width * (1 if self.tied else 2)
    return self.num_layers * layer + embeddings + self.width

  @property
  def cache_bytes_per_token(self) -> int:
    """Bytes of K and V that one position of one row takes, all layers."""
    size = 4 if self.dtype == "float32" else 2
    return 2 * self.num_layers * self.num_kv_heads * self.head_dim * size
