"""Shape, logical axes and sharding of every parameter of a decoder.

Paths are those of the Flax parameter tree, joined by '/'. Axis names are those
of `sharding.Rules`; an axis without a rule there is replicated.
"""

from typing import NamedTuple

from flax import traverse_util

from specdec import sharding
from specdec.models.config import TransformerConfig


class ParamSpec(NamedTuple):
  """Logical axes and sizes of one parameter, dimension by dimension."""

  axes: tuple[str, ...]
  shape: tuple[int, ...]


def _layer_axes(config: TransformerConfig) -> dict[str, tuple[str, ...]]:
  """Returns path below a layer -> logical axes."""
  axes: dict[str, tuple[str, ...]] = {"attention_norm/scale": ("width",)}
  for name, axis in {"q": "query", "k": "key", "v": "key"}.items():
    axes[f"attention/{name}/weight"] = (axis, "width")
    if config.qkv_bias:
      axes[f"attention/{name}/bias"] = (axis,)
    if config.qk_norm and name != "v":
      axes[f"attention/{name}_norm/scale"] = ("head",)
  axes["attention/o/weight"] = ("width", "query")
  axes["mlp_norm/scale"] = ("width",)
  if config.post_norms:
    axes["attention_post_norm/scale"] = ("width",)
    axes["mlp_post_norm/scale"] = ("width",)
  stack: tuple[str, ...] = ()
  if config.num_experts:
    stack = ("experts",)
    axes["mlp/router/weight"] = ("experts", "width")
  axes["mlp/gate/weight"] = (*stack, "mlp", "width")
  axes["mlp/up/weight"] = (*stack, "mlp", "width")
  axes["mlp/down/weight"] = (*stack, "width", "mlp")
  return axes


def specs(config: TransformerConfig) -> dict[str, ParamSpec]:
  """Returns path -> ParamSpec; parameters outside the layers come first."""
  axes: dict[str, tuple[str, ...]] = {
    "embed/weight": ("vocab", "width"),
    "final_norm/scale": ("width",),
  }
  if not config.tied:
    axes["head/weight"] = ("vocab", "width")
  layer_axes = _layer_axes(config)
  for layer in range(config.num_layers):
    axes |= {
      f"layer_{layer}/{path}": names for path, names in layer_axes.items()
    }
  sizes = {
    "vocab": config.vocab_size,
    "width": config.width,
    "mlp": config.mlp_width,
    "query": config.num_heads * config.head_dim,
    "key": config.num_kv_heads * config.head_dim,
    "head": config.head_dim,
    "experts": config.num_experts,
  }
  return {
    path: ParamSpec(names, tuple(sizes[name] for name in names))
    for path, names in axes.items()
  }


def shardings(config: TransformerConfig, placement: sharding.Placement) -> dict:
  """Returns the NamedSharding of every parameter, as a tree like the params.

  Raises ValueError where an axis is not divisible by its devices.
  """
  return traverse_util.unflatten_dict(
    {
      path: placement.sharding(spec.axes, path, spec.shape)
      for path, spec in specs(config).items()
    },
    sep="/",
  )
