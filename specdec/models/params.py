"""Shape, type, logical axes and sharding of every parameter of a model.

Paths are those of the Flax parameter tree, joined by '/'. Axis names are those
of `sharding.Rules`; an axis without a rule there is replicated.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import NamedTuple

import jax
from flax import traverse_util

from specdec import sharding
from specdec.models.config import TransformerConfig, stays_float32
from specdec.models.parts import GATED_DELTA, Recurrence
from specdec.models.quantization import Quantized, largest_divisor
from specdec.models.weight_formats import BITS, WeightFormat
from specdec.types import PyTree
from specdec.utils.spelling import naming

ENCODER = "encoder/"  # begins the paths of what a decoding pass does not read


class ParamSpec(NamedTuple):
  """Logical axes and sizes of one parameter, dimension by dimension."""

  axes: tuple[str | None, ...]
  shape: tuple[int, ...]
  dtype: str = "float32"

  @property
  def nbytes(self) -> float:
    return BITS[self.dtype] / 8 * math.prod(self.shape)


def layer_axes(
  config: TransformerConfig,
  cross: bool = False,
  recurrent: bool = False,
  dense: bool = False,
) -> dict[str, tuple[str, ...]]:
  """Returns path below a layer -> logical axes.

  Args:
    cross: the layer attends to a source.
    recurrent: it has a state in the place of attention.
    dense: it has an MLP in the place of a mixture's experts.
  """
  axes: dict[str, tuple[str, ...]] = {}
  if config.pre_norms:
    axes["attention_norm/scale"] = ("width",)
  if recurrent:
    axes |= _recurrent_axes(config.recurrence)
  elif latent := config.latent:
    axes |= {
      "attention/q/weight": (
        "query",
        "query_low" if latent.query_rank else "width",
      ),
      "attention/kv_down/weight": ("cached", "width"),
      "attention/kv_norm/scale": ("latent",),
      "attention/k_up/kernel": ("query_key", "latent"),
      "attention/v_up/kernel": ("value", "latent"),
      "attention/o/weight": ("width", "value"),
    }
    if latent.query_rank:
      axes["attention/q_down/weight"] = ("query_low", "width")
      axes["attention/q_norm/scale"] = ("query_low",)
  else:
    for name, axis in {"q": "query", "k": "key", "v": "key"}.items():
      axes[f"attention/{name}/weight"] = (axis, "width")
      if config.qkv_bias:
        axes[f"attention/{name}/bias"] = (axis,)
      if config.qk_norm and name != "v":
        whole = axis if config.joint_qk_norm else "head"
        axes[f"attention/{name}_norm/scale"] = (whole,)
    if config.attention_gate:
      axes["attention/gate/weight"] = ("query", "width")
    axes["attention/o/weight"] = ("width", "query")
    if config.o_bias:
      axes["attention/o/bias"] = ("width",)
    if config.attention_sinks:
      axes["attention/sink_logits"] = ("heads",)
  if cross:
    axes["cross_norm/scale"] = ("width",)
    axes["cross/q/weight"] = ("query", "width")
    axes["cross/o/weight"] = ("width", "query")
  if config.pre_norms:
    axes["mlp_norm/scale"] = ("width",)
  if config.post_norms:
    axes["attention_post_norm/scale"] = ("width",)
    axes["mlp_post_norm/scale"] = ("width",)
  stack, inner = (), "dense" if dense else "mlp"
  if config.num_experts and not dense:
    stack, inner = ("experts",), "expert_mlp"
    axes["mlp/router/weight"] = ("routes", "width")
    if config.routing:
      axes["mlp/choice_bias"] = ("routes",)
  if config.gated:
    axes["mlp/gate/weight"] = (*stack, inner, "width")
  axes["mlp/up/weight"] = (*stack, inner, "width")
  axes["mlp/down/weight"] = (*stack, "width", inner)
  if dense:
    return axes
  if config.expert_biases:
    axes["mlp/router/bias"] = ("routes",)
    axes["mlp/gate/bias"] = axes["mlp/up/bias"] = (*stack, inner)
    axes["mlp/down/bias"] = (*stack, "width")
  if config.shared_width:
    axes["shared/gate/weight"] = axes["shared/up/weight"] = ("shared", "width")
    axes["shared/down/weight"] = ("width", "shared")
  if config.shared_gate:
    axes["shared_gate/weight"] = ("one", "width")
  return axes


def _recurrent_axes(recurrence: Recurrence) -> dict[str, tuple[str, ...]]:
  """Returns path below a layer -> logical axes of a recurrent sublayer."""
  is_delta = recurrence.kind == GATED_DELTA
  channels = {"q": "state_key", "k": "state_key", "v": "state"}
  axes: dict[str, tuple[str, ...]] = {}
  for name, axis in channels.items():
    axes[f"recurrent/{name}/weight"] = (axis, "width")
    axes[f"recurrent/{name}_conv/kernel"] = (axis, "one", "kernel")
    if recurrence.conv_bias:
      axes[f"recurrent/{name}_conv/bias"] = (axis,)
  axes["recurrent/gate/weight"] = ("state", "width")
  for name in ("decay", "rate") if is_delta else ("decay",):
    axes[f"recurrent/{name}/weight"] = ("state_head", "width")
  for name in ("decay_bias", "log_decay") + (() if is_delta else ("skip",)):
    axes[f"recurrent/{name}"] = ("state_head",)
  norm = "state_dim" if is_delta else "state"
  axes["recurrent/norm/scale"] = (norm,)
  axes["recurrent/o/weight"] = ("width", "state")
  return axes


def specs(config: TransformerConfig) -> dict[str, ParamSpec]:
  """Returns path -> ParamSpec; parameters outside the layers come first."""
  axes: dict[str, tuple[str, ...]] = {
    "embed/weight": ("vocab", "width"),
    "final_norm/scale": ("width",),
  }
  if not config.tied:
    axes["head/weight"] = ("vocab", "width")
  if config.relative_buckets:
    axes["relative_bias/table"] = ("buckets", "heads")

  def add_layers(count: int, prefix: str, cross: bool) -> None:
    for i in range(count):
      kind = config.is_recurrent(i), i in config.dense_layers
      in_layer = layer_axes(config, cross, *kind)
      axes.update({f"{prefix}{i}/{path}": x for path, x in in_layer.items()})

  add_layers(config.num_layers, "layer_", bool(config.encoder_layers))
  if config.encoder_layers:
    axes[f"{ENCODER}relative_bias/table"] = ("buckets", "heads")
    add_layers(config.encoder_layers, f"{ENCODER}layer_", cross=False)
    axes[f"{ENCODER}final_norm/scale"] = ("width",)
    for layer in range(config.num_layers):
      for name in "kv":
        path = f"{ENCODER}cross_{layer}/{name}/weight"
        axes[path] = ("key", "width")
  sizes = {
    "vocab": config.vocab_size,
    "width": config.width,
    "mlp": config.mlp_width,
    "query": config.num_heads * config.head_dim,
    "key": config.num_kv_heads * config.head_dim,
    "head": config.head_dim,
    "experts": config.num_experts,
    "routes": config.num_experts,
    "expert_mlp": config.mlp_width,
    "buckets": config.relative_buckets,
    "heads": config.num_heads,
    "shared": config.shared_width,
    "dense": config.dense_width,
    "one": 1,
  }
  if latent := config.latent:
    sizes |= {
      "query_low": latent.query_rank or 0,
      "cached": latent.cached,
      "latent": latent.rank,
      "query_key": config.num_heads * latent.key_dim,
      "value": config.num_heads * latent.value_dim,
    }
  if r := config.recurrence:
    sizes |= {
      "state_key": r.num_key_heads * r.key_dim,
      "state": r.num_heads * r.value_dim,
      "state_head": r.num_heads,
      "state_dim": r.value_dim,
      "kernel": r.kernel,
    }
  return {
    path: ParamSpec(names, tuple(sizes[name] for name in names))
    for path, names in axes.items()
  }


def held(config: TransformerConfig) -> dict[str, ParamSpec | Quantized]:
  """Returns path -> ParamSpec as the parameter is held, or Quantized of them.

  Raises ValueError where a group does not divide the inputs of a matrix.
  """
  return {
    path: _held(path, spec, config.format_of(path))
    for path, spec in specs(config).items()
  }


def _held(
  path: str, spec: ParamSpec, form: WeightFormat
) -> ParamSpec | Quantized:
  values = spec._replace(dtype=form.kind)
  if not form.is_integer:
    return values
  with naming(path):
    groups = form.groups(spec.shape[1])
  # One scale for all inputs goes with each of their parts.
  axes = spec.axes[0], spec.axes[1] if groups > 1 else None
  scale = ParamSpec(axes, (spec.shape[0], groups))
  return Quantized(values, scale, scale if form.has_offset else None)


def leaves(spec: ParamSpec | Quantized) -> list[ParamSpec]:
  """Returns the arrays of which a parameter consists."""
  return [spec] if isinstance(spec, ParamSpec) else [x for x in spec if x]


def in_groups(
  config: TransformerConfig, bits: int, group: int
) -> TransformerConfig:
  """Returns a config whose matrices are held as layouts.quantize holds them."""
  return dataclasses.replace(
    config,
    weights=tuple(
      (path, WeightFormat(f"int{bits}", largest_divisor(spec.shape[1], group)))
      for path, spec in specs(config).items()
      if path.endswith("/weight")
    ),
  )


def head_weight_size(config: TransformerConfig) -> float:
  """Returns the bytes of a weight of the vocabulary projection."""
  table = "embed/weight" if config.tied else "head/weight"
  return _weight_size([held(config)[table]])


def read_size(config: TransformerConfig) -> float:
  """Returns the bytes of a weight, on average, that a pass reads."""
  every = held(config)
  if not config.tied:
    del every["embed/weight"]  # one row a token
  return _weight_size(
    [spec for path, spec in every.items() if not path.startswith(ENCODER)]
  )


def _weight_size(every: Collection[ParamSpec | Quantized]) -> float:
  """Returns the bytes of a weight, its share of scales and offsets included."""
  sizes = sum(x.nbytes for spec in every for x in leaves(spec))
  return sizes / sum(math.prod(leaves(spec)[0].shape) for spec in every)


def cast(params: PyTree, dtype: str) -> PyTree:
  """Returns parameters in a type, but integers and what is never rounded."""

  def of_leaf(path, x):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if isinstance(x, Quantized) or stays_float32(name):
      return x
    return x.astype(dtype)

  return jax.tree_util.tree_map_with_path(
    of_leaf, params, is_leaf=lambda x: isinstance(x, Quantized)
  )


def shardings(
  config: TransformerConfig,
  placement: sharding.Placement,
  cut_groups: bool = False,
) -> dict:
  """Returns the NamedSharding of every parameter, as a tree like the params.

  Args:
    cut_groups: where devices do not divide the groups of a matrix, each has all
      its scales; else that is refused.

  Raises ValueError where an axis is not divisible by its devices.
  """

  def place(path: str, spec: ParamSpec | Quantized):
    if isinstance(spec, ParamSpec):
      return placement.sharding(spec.axes, path, spec.shape)
    axes, shape, _ = spec.scale
    if axes[1] and shape[1] % placement.ways(axes[1]):
      if not cut_groups:
        raise ValueError(
          f"{path}: {placement.ways(axes[1])} devices do not divide its "
          f"{shape[1]} groups of {config.format_of(path)}; take int8, one "
          "group an output, or smaller groups"
        )
      axes = axes[0], None
    scale = placement.sharding(axes, path, shape)
    values = placement.sharding(spec.values.axes, path, spec.values.shape)
    return Quantized(values, scale, spec.offset and scale)

  return traverse_util.unflatten_dict(
    {path: place(path, spec) for path, spec in held(config).items()}, sep="/"
  )
