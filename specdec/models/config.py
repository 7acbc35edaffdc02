"""Configuration of a transformer decoder, with an encoder or without."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.models import rope_scaling
from specdec.models.checks import check_counts, check_positive
from specdec.models.parts import GroupRouting, Latent, Recurrence
from specdec.models.rope_scaling import LongRope, Scaling, Yarn
from specdec.models.weight_formats import WeightFormat
from specdec.utils.spelling import check_choice, join_names

ACTIVATIONS = "silu", "gelu_tanh", "relu", "quick_gelu"
DTYPES = "float32", "bfloat16"
KV_TYPES = ("int8",)  # of keys and values in a cache, beside dtype
# Far above any published model; files with more are damaged or hostile.
_MAX_LAYERS, _MAX_EXPERTS, _MAX_ROWS = 4096, 2**17, 2**24
# Fields of TransformerConfig after vocab_size.
SIZES = ("num_layers", "width", "mlp_width")
SIZES += ("num_heads", "num_kv_heads", "head_dim")
# Fields of TransformerConfig that Gemma 2 and 3 share.
GEMMA = {
  "post_norms": True,
  "norm_offset": True,
  "scale_embedding": True,
  "activation": "gelu_tanh",
}
OLMO2 = {
  "pre_norms": False,
  "post_norms": True,
  "qk_norm": True,
  "joint_qk_norm": True,
}


def check_limits(num_layers: int, num_experts: int) -> None:
  """Raises ValueError for more layers or experts than any published model."""
  if num_layers > _MAX_LAYERS:
    raise ValueError(
      f"num_layers = {num_layers:,}; at most {_MAX_LAYERS:,} are accepted"
    )
  if num_experts * num_layers > _MAX_EXPERTS:
    raise ValueError(
      f"num_experts = {num_experts:,} in each of {num_layers:,} layers; at "
      f"most {_MAX_EXPERTS:,} experts in all are accepted"
    )


def _check_buckets(buckets: int, distance: int) -> None:
  if buckets < 4 or buckets % 4 or distance <= buckets // 2:
    raise ValueError(
      f"relative_buckets = {buckets} up to relative_distance = {distance}; "
      "buckets must be a multiple of 4, and the distance above half of them"
    )


def stays_float32(path: str) -> bool:
  """Whether a parameter is never rounded: biases of a routing, as rounded ones
  would choose other experts."""
  return path.endswith("/choice_bias")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Configuration of a transformer of the Llama lineage, or of T5's.

  The defaults describe Llama. Qwen 2 sets `qkv_bias`, Qwen 3 `qk_norm`, Mixtral
  and Qwen 3 MoE the experts; options marked Gemma belong to Gemma 2 and 3,
  those marked T5 to T5 and mT5. All options are independent of each other,
  unless the checks say otherwise.
  Norms, softmax and logits are computed in float32 in either dtype.
  """

  vocab_size: int
  num_layers: int
  width: int  # of the residual stream
  mlp_width: int  # inner width of the MLP, or of each expert
  num_heads: int  # of queries; a multiple of num_kv_heads
  num_kv_heads: int
  head_dim: int
  norm_epsilon: float = 1e-5  # added to the mean square inside RMSNorm
  rope_theta: float = 10_000.0  # base of the rotary frequencies
  rope_scaling: Scaling | None = None
  rotary_dims: int | None = None  # first ones of a head (Phi-4 mini); None: all
  unrotated_layers: tuple[int, ...] = ()  # without rotary embeddings (SmolLM3)
  # Rotated pairs of dimensions are (2i, 2i + 1), not halves (Llama 4).
  rope_interleaved: bool = False
  # a of the factor 1 + a log(1 + floor((position + 1) / unrotated_floor)) of
  # queries in layers without rotation (Llama 4; arXiv:2501.19399).
  unrotated_growth: float = 0.0
  unrotated_floor: int = 8192
  # Base, unscaled, in layers with a window (Gemma 3); None: as elsewhere.
  local_rope_theta: float | None = None
  tied: bool = False  # the embedding is also the vocabulary projection
  # For each layer None for full attention, or its sliding window in positions,
  # the token's included; () for full attention in all.
  windows: tuple[int | None, ...] = ()
  # Windows are chunks, which begin at multiples of their size (Llama 4).
  chunked: bool = False
  qkv_bias: bool = False
  o_bias: bool = False  # of attention's output projection (GPT-OSS)
  # A learned logit a head takes part in the softmax, without a value (GPT-OSS).
  attention_sinks: bool = False
  qk_norm: bool = False  # query and key heads pass an RMSNorm before RoPE
  unit_qk_norm: bool = False  # after RoPE, where it is; no scale (Llama 4)
  joint_qk_norm: bool = False  # these norms span all heads at once (OLMo 2)
  attention_gate: bool = False  # sigmoids multiply heads' outputs (Qwen3-Next)
  # Scores are divided by its square root (Gemma); None: by that of head_dim.
  query_scalar: float | None = None
  attention_softcap: float | None = None  # c of scores c tanh(s / c) (Gemma 2)
  logit_softcap: float | None = None  # the same for the logits (Gemma 2)
  pre_norms: bool = True  # inputs of attention and MLP are normed (not OLMo 2)
  post_norms: bool = False  # outputs of attention and MLP are normed (Gemma)
  norm_offset: bool = False  # RMSNorm multiplies by 1 + scale (Gemma)
  scale_embedding: bool = False  # embeddings times sqrt(width) (Gemma)
  activation: str = "silu"  # of the MLP's gate; 'gelu_tanh' (Gemma)
  # Bounds gates from above and ups on both sides, in act(gate(x)) (up(x) + 1)
  # (GPT-OSS); None: as above.
  swiglu_limit: float | None = None
  gated: bool = True  # False: act(up(x)) instead of act(gate(x)) up(x) (T5 1.0)
  # Files hold q, k and v as one matrix, and gate and up as another (Phi-3).
  fused: bool = False
  num_experts: int = 0  # in each layer; 0: a dense MLP without a router
  experts_per_token: int = 0
  expert_biases: bool = False  # of their matrices and the router's (GPT-OSS)
  normalize_experts: bool = True  # a token's routing weights sum to one
  routing: GroupRouting | None = None  # None: softmax over all experts
  # Sigmoids of the chosen scores multiply experts' inputs (Llama 4), instead of
  # their softmax the outputs.
  route_inputs: bool = False
  # Layers with an MLP of dense_width in the place of experts.
  dense_layers: tuple[int, ...] = ()
  dense_width: int = 0
  # Inner width of the shared expert, an MLP that every token passes; 0: none.
  shared_width: int = 0
  shared_gate: bool = False  # a sigmoid of the token weighs it (Qwen3-Next)
  dtype: str = "float32"  # of activations, KV cache and weights
  # Buckets of a learned bias by relative position, shared by all layers, in the
  # place of rotary embeddings (T5, arXiv:1910.10683); 0: rotary embeddings.
  relative_buckets: int = 0
  relative_distance: int = 128  # from here on positions share the last bucket
  scale_logits: bool = False  # logits divided by sqrt(width) (T5 1.0)
  encoder_layers: int = 0  # of the encoder that decoder layers attend to (T5)
  # Stands for tokens that a draft has not drawn yet (PARD); None: it has none.
  mask_token: int | None = None
  start_token: int = 0  # with which an encoder-decoder's output begins
  recurrence: Recurrence | None = None  # of layers without attention
  # Of all layers with attention, with num_kv_heads = 1; None: keys and values
  # of num_kv_heads heads.
  latent: Latent | None = None
  # 'int8': keys and values in the cache, each with a scale; None: dtype.
  kv: str | None = None
  # Of all matrices, or of those with these paths; None: dtype.
  weights: WeightFormat | tuple[tuple[str, WeightFormat], ...] | None = None

  @property
  def first_token(self) -> int | None:
    """Token with which an encoder-decoder's output begins; None: a decoder."""
    return self.start_token if self.encoder_layers else None

  @property
  def counts(self) -> dict[str, int]:
    """Sizes of the dimensions that a mesh splits, by sharding.Rules names."""
    counts = {
      "vocab": self.vocab_size,
      "query": self.num_heads,
      "key": self.num_kv_heads,
      "mlp": self.mlp_width,
      "shared": self.shared_width,
      "dense": self.dense_width,
      "experts": self.num_experts,
    }
    if r := self.recurrence:
      counts |= {"state": r.num_heads, "state_key": r.num_key_heads}
    return counts

  def __post_init__(self):
    check_counts(self, "vocab_size", *SIZES)
    check_positive(self, "norm_epsilon", "rope_theta")
    optional = "local_rope_theta", "query_scalar"
    optional += "attention_softcap", "logit_softcap", "swiglu_limit"
    check_positive(self, *optional, optional=True)
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
        f"{self.num_kv_heads}"
      )
    if not self.relative_buckets:
      self._check_rotary()
    if self.recurrence is not None:
      self._check_recurrence()
    if self.latent is not None:
      self._check_latent()
    if self.windows and len(self.windows) != self.num_layers:
      raise ValueError(
        f"windows has {len(self.windows)} entries for {self.num_layers} layers"
      )
    if any(window is not None and window < 1 for window in self.windows):
      raise ValueError(f"windows = {self.windows}; each must be None or >= 1")
    if self.local_rope_theta is not None and not any(self.windows):
      raise ValueError(
        f"local_rope_theta = {self.local_rope_theta} needs layers with windows"
      )
    if self.num_experts < 0 or self.num_experts == 1:
      raise ValueError(f"num_experts = {self.num_experts}; it must be 0 or > 1")
    minimum = 1 if self.num_experts else 0
    if not minimum <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f"experts_per_token = {self.experts_per_token} with num_experts = "
        f"{self.num_experts}; it must be in {minimum}..{self.num_experts}"
      )
    if self.relative_buckets:
      _check_buckets(self.relative_buckets, self.relative_distance)
    if self.encoder_layers < 0:
      raise ValueError(
        f"encoder_layers = {self.encoder_layers}; it must be >= 0"
      )
    if self.encoder_layers and not self.relative_buckets:
      raise ValueError("an encoder needs relative_buckets")
    if self.fused and (
      self.num_experts
      or self.qkv_bias
      or self.o_bias
      or not self.gated
      or self.encoder_layers
    ):
      raise ValueError(
        "fused matrices are of a decoder with gated, dense MLPs and no biases"
      )
    if self.joint_qk_norm and not self.qk_norm:
      raise ValueError("joint_qk_norm = True needs qk_norm")
    if not self.pre_norms and (not self.post_norms or self.encoder_layers):
      raise ValueError(
        "pre_norms = False needs post_norms, and a decoder without an encoder"
      )
    if self.shared_width < 0 or (self.shared_width and not self.num_experts):
      raise ValueError(
        f"shared_width = {self.shared_width}; it must be 0, or above 0 "
        "with experts"
      )
    self._check_mixture()
    if self.unrotated_floor < 1 or self.unrotated_growth < 0:
      raise ValueError(
        f"unrotated_growth = {self.unrotated_growth} by unrotated_floor = "
        f"{self.unrotated_floor}; they must be >= 0 and >= 1"
      )
    if self.unit_qk_norm and self.qk_norm:
      raise ValueError("unit_qk_norm and qk_norm: take one of them")
    if self.shared_gate and not self.shared_width:
      raise ValueError("shared_gate = True needs shared_width")
    if self.expert_biases and not self.num_experts:
      raise ValueError("expert_biases = True needs experts")
    if self.swiglu_limit is not None and not self.gated:
      raise ValueError("swiglu_limit is of gated MLPs")
    if self.attention_sinks and self.encoder_layers:
      raise ValueError("attention_sinks are of a decoder without an encoder")
    if self.num_experts and not self.gated:
      raise ValueError("experts are gated: gated = False is for dense MLPs")
    if self.encoder_layers and (any(self.windows) or self.num_experts):
      raise ValueError("an encoder needs full attention and dense MLPs")
    if not 0 <= self.start_token < self.vocab_size:
      raise ValueError(
        f"start_token = {self.start_token}; it must be in "
        f"0..{self.vocab_size - 1}"
      )
    if self.mask_token is not None and not (
      0 <= self.mask_token < self.vocab_size
    ):
      raise ValueError(
        f"mask_token = {self.mask_token}; it must be None or in "
        f"0..{self.vocab_size - 1}"
      )
    check_choice("activation", self.activation, ACTIVATIONS)
    check_choice("dtype", self.dtype, DTYPES)
    if self.kv is not None:
      check_choice("kv", self.kv, KV_TYPES)
    one_for_all = isinstance(self.weights, WeightFormat)
    if self.num_experts and one_for_all and self.weights.is_integer:
      raise ValueError(
        f"weights = {self.weights}: a mixture of experts is held in "
        f"{' or '.join(DTYPES)}"
      )

  def _check_mixture(self) -> None:
    dense, count = self.dense_layers, self.num_layers
    in_order = sorted({*dense}) == list(dense)
    if (
      not (in_order and all(layer in range(count) for layer in dense))
      or bool(dense) != bool(self.dense_width)
      or self.dense_width < 0
    ):
      raise ValueError(
        f"dense_layers = {dense} of width {self.dense_width}; give ascending "
        f"layers of 0..{count - 1} and a width, or neither"
      )
    if dense and (not self.num_experts or len(dense) == count):
      raise ValueError("dense_layers are some of the layers of a mixture")
    if self.route_inputs and (not self.num_experts or self.expert_biases):
      raise ValueError("route_inputs is of experts without biases")

    if (routing := self.routing) is None:
      return
    if (
      self.route_inputs
      or self.expert_biases
      or (not self.num_experts or self.num_experts % routing.groups)
    ):
      raise ValueError(
        f"routing by {routing.groups} groups is of experts that they divide, "
        f"without route_inputs and expert_biases; num_experts = "
        f"{self.num_experts}"
      )
    in_groups = self.num_experts // routing.groups
    least, most = 2, routing.groups_per_token * in_groups
    if in_groups < least or self.experts_per_token > most:
      raise ValueError(
        f"experts_per_token = {self.experts_per_token} of "
        f"{routing.groups_per_token} groups of {in_groups}; a group has at "
        f"least {least}, and there must be as many in the chosen ones"
      )

  def _check_latent(self) -> None:
    latent = self.latent
    dims = latent.key_dim + latent.rotary_dims, latent.rotary_dims
    if (self.head_dim, self.rotary_dims) != dims or self.num_kv_heads != 1:
      raise ValueError(
        f"head_dim = {self.head_dim}, rotary_dims = {self.rotary_dims} and "
        f"num_kv_heads = {self.num_kv_heads}; with latent attention they are "
        f"{dims[0]}, {dims[1]} and 1"
      )
    rows = self.num_heads * max(self.head_dim, latent.value_dim)
    if rows > _MAX_ROWS:
      raise ValueError(
        f"{self.num_heads} heads of {self.head_dim} and {latent.value_dim} "
        f"dimensions; at most {_MAX_ROWS:,} in all are accepted"
      )
    names = "qkv_bias", "o_bias", "qk_norm", "unit_qk_norm", "attention_gate"
    names += "attention_sinks", "fused", "encoder_layers", "relative_buckets"
    given = [name for name in names if getattr(self, name)]
    if given or self.attention_softcap:
      raise ValueError(
        f"latent attention has no {join_names(given or ['softcap'])}"
      )

  def _check_recurrence(self) -> None:
    r = self.recurrence
    if r.layers[-1] >= self.num_layers:
      raise ValueError(
        f"layer {r.layers[-1]} of the recurrence; this model has "
        f"{self.num_layers} layers"
      )
    if self.encoder_layers or self.fused or self.post_norms:
      raise ValueError(
        "recurrent layers are of a decoder with norms in front of sublayers"
      )
    if any(self.windows) and any(self.windows[i] for i in r.layers):
      raise ValueError(
        f"windows = {self.windows}; layers {r.layers} have no attention"
      )

  def _check_rotary(self) -> None:
    if self.head_dim % 2 and self.rotary_dims is None:
      raise ValueError(
        f"head_dim = {self.head_dim}; rotary embeddings need an even one"
      )
    dims = self.head_dim if self.rotary_dims is None else self.rotary_dims
    if dims % 2 or not 0 < dims <= self.head_dim:
      raise ValueError(
        f"rotary_dims = {dims}; it must be even and in 2..head_dim = "
        f"{self.head_dim}"
      )
    layers = self.unrotated_layers
    if any(layer not in range(self.num_layers) for layer in layers):
      raise ValueError(
        f"unrotated_layers = {layers}; each must be in 0..{self.num_layers - 1}"
      )
    scaling, pairs = self.rope_scaling, dims // 2
    if isinstance(scaling, LongRope) and len(scaling.factors) != pairs:
      raise ValueError(
        f"longrope has {len(scaling.factors)} factors for {pairs} pairs of "
        "rotated dimensions"
      )
    if isinstance(scaling, Yarn) and self.rope_theta <= 1:
      raise ValueError(
        f"rope_theta = {self.rope_theta}; yarn needs one above 1"
      )

  @property
  def is_quantized(self) -> bool:
    """Whether matrices are held as integers."""
    if isinstance(self.weights, WeightFormat):
      return self.weights.is_integer
    return any(form.is_integer for _, form in self.weights or ())

  def format_of(self, path: str) -> WeightFormat:
    """Returns how the parameter of that path is held."""
    if stays_float32(path):
      return WeightFormat("float32")
    held = WeightFormat(self.dtype)
    if self.weights is None or not path.endswith("/weight"):
      return held
    if isinstance(self.weights, WeightFormat):
      return self.weights
    return dict(self.weights).get(path, held)

  @property
  def num_parameters(self) -> int:
    """Number of weights; a tied embedding counts once."""
    heads = self.num_heads + self.num_kv_heads
    attention = self.width * self.head_dim * 2 * heads  # q, k, v and o
    if self.latent:
      attention = self.latent.num_parameters(self.width, self.num_heads)
    extra = 0  # biases, norms and gates
    if self.attention_gate:
      extra += self.width * self.num_heads * self.head_dim
    if self.qkv_bias:
      extra += self.head_dim * (heads + self.num_kv_heads)
    extra += self.width * self.o_bias + self.num_heads * self.attention_sinks
    if self.qk_norm:
      extra += self.head_dim * (heads if self.joint_qk_norm else 2)
    layer = 2 * (self.pre_norms + self.post_norms) * self.width
    matrices = 3 if self.gated else 2
    inner = max(self.num_experts, 1) * self.mlp_width + self.shared_width
    mlp = matrices * self.width * inner
    mlp += self.width * self.shared_gate
    mlp += self.num_experts * self.width  # the router
    if self.routing:
      mlp += self.num_experts  # biases of the choice
    if self.expert_biases:
      mlp += self.num_experts * (2 * self.mlp_width + self.width + 1)
    layer += mlp
    outside = self.vocab_size * self.width * (1 if self.tied else 2)
    outside += self.width + self.relative_buckets * self.num_heads
    if self.encoder_layers:
      outside += self.encoder_layers * (layer + attention + extra)
      outside += self.width + self.relative_buckets * self.num_heads
      layer += attention + self.width  # cross-attention and its norm
    dense = matrices * self.width * self.dense_width
    outside += len(self.dense_layers) * (dense - mlp)
    mixers = self.num_attention_layers * (attention + extra)
    if r := self.recurrence:
      mixers += len(r.layers) * r.num_parameters(self.width)
    return self.num_layers * layer + mixers + outside

  @property
  def num_attention_layers(self) -> int:
    """Layers with keys and values."""
    recurrent = self.recurrence.layers if self.recurrence else ()
    return self.num_layers - len(recurrent)

  @property
  def kv_dims(self) -> tuple[int, int]:
    """Values of a key and of a value in the cache, of one head."""
    if latent := self.latent:
      return latent.rotary_dims, latent.rank
    return self.head_dim, self.head_dim

  @property
  def kv_size(self) -> int:
    """Values of a position in the cache of a layer with attention; the scale of
    an int8 key or value counts as the four bytes that it takes."""
    scales = 0 if self.kv is None else 4 * len(self.kv_dims)
    return self.num_kv_heads * (sum(self.kv_dims) + scales)

  @property
  def score_size(self) -> int:
    """Multiply-adds of attention in a layer, for a token and a position."""
    size = self.num_heads * sum(self.kv_dims)
    if self.latent:  # a value is part of its key
      size += self.num_heads * self.latent.rank
    return size

  def is_recurrent(self, layer: int) -> bool:
    """Whether a layer has a state in the place of attention."""
    return self.recurrence is not None and layer in self.recurrence.layers

  @property
  def state_bytes(self) -> int:
    """Bytes that recurrent layers keep for a row, whatever its length."""
    if self.recurrence is None:
      return 0
    r = self.recurrence
    return len(r.layers) * sum(r.row_bytes(self.dtype))

  @property
  def cache_bytes_per_token(self) -> int:
    """Bytes of the KV cache for one position of one row, over all layers.

    Cross-attention keeps as many for each position of the source.
    """
    size = 4 if self.dtype == "float32" else 2
    if self.kv is not None:
      size = 1
    return self.num_attention_layers * self.kv_size * size


_NESTED = {
  "rope_scaling": rope_scaling.from_fields,
  "recurrence": lambda x: Recurrence(**{**x, "layers": tuple(x["layers"])}),
  "latent": lambda x: Latent(**x),
  "routing": lambda x: GroupRouting(**x),
}


def from_fields(fields: Mapping[str, Any]) -> TransformerConfig:
  """Returns the config of which dataclasses.asdict made these fields, or JSON,
  with lists in the place of tuples.

  Raises:
    TypeError: a field is unknown.
    ValueError: a value is out of range.
  """

  def value(name: str, x: Any) -> Any:
    if isinstance(x, Mapping) and name in _NESTED:
      return _NESTED[name](x)
    return tuple(x) if isinstance(x, list) else x

  return TransformerConfig(
    **{name: value(name, x) for name, x in fields.items()}
  )
