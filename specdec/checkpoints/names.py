"""Names of every parameter in Hugging Face checkpoints and GGUF files.

`specdec.models.params` lists the parameters of a config with their shapes; the
tables here only map their paths. A new model family adds rows to a table.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from specdec.models import params
from specdec.models.config import TransformerConfig
from specdec.utils.spelling import join_names


class Row(NamedTuple):
  """Names of one kind of parameter; '{}' stands for the layer's index.

  Where the Hugging Face name contains '{expert}', there is one tensor for each
  expert; the parameter tree and GGUF files stack them along a first axis.
  """

  hugging_face: str
  gguf: str
  permuted_heads: str = ""  # config field that counts the heads whose rows
  #                           llama.cpp interleaves; '' where it does not


class Tensor(NamedTuple):
  """One tensor that a checkpoint of a given config must hold."""

  path: str  # in the parameter tree, joined by '/'
  hugging_face: tuple[str, ...]  # one name, or one for each expert
  gguf: str
  axes: tuple[str, ...]  # logical axes, as in sharding.Rules
  shape: tuple[int, ...]
  permuted_heads: int  # 0: rows are in the order of Hugging Face
  gguf_offset: float  # added in GGUF files: 1 where they hold 1 + scale

  @property
  def part_shape(self) -> tuple[int, ...]:
    """Shape under each of the Hugging Face names."""
    return self.shape[1:] if len(self.hugging_face) > 1 else self.shape


def _layer(hugging_face: str, gguf: str, permuted_heads: str = "") -> Row:
  return Row(
    f"model.layers.{{}}.{hugging_face}", f"blk.{{}}.{gguf}", permuted_heads
  )


def _experts(block: str, **projections: str) -> dict[str, Row]:
  """Returns the rows of router and experts, whose MLP is called `block`."""
  rows = {
    "mlp/router/weight": _layer(f"{block}.gate.weight", "ffn_gate_inp.weight")
  }
  for name, hugging_face in projections.items():
    rows[f"mlp/{name}/weight"] = _layer(
      f"{block}.experts.{{expert}}.{hugging_face}.weight",
      f"ffn_{name}_exps.weight",
    )
  return rows


_OUTSIDE_LAYERS = {
  "embed/weight": Row("model.embed_tokens.weight", "token_embd.weight"),
  "final_norm/scale": Row("model.norm.weight", "output_norm.weight"),
  "head/weight": Row("lm_head.weight", "output.weight"),
}
# By path below a layer.
_IN_LAYER = {
  "attention_norm/scale": _layer("input_layernorm.weight", "attn_norm.weight"),
  "attention/q/weight": _layer(
    "self_attn.q_proj.weight", "attn_q.weight", "num_heads"
  ),
  "attention/k/weight": _layer(
    "self_attn.k_proj.weight", "attn_k.weight", "num_kv_heads"
  ),
  "attention/v/weight": _layer("self_attn.v_proj.weight", "attn_v.weight"),
  "attention/q/bias": _layer("self_attn.q_proj.bias", "attn_q.bias"),
  "attention/k/bias": _layer("self_attn.k_proj.bias", "attn_k.bias"),
  "attention/v/bias": _layer("self_attn.v_proj.bias", "attn_v.bias"),
  "attention/q_norm/scale": _layer(
    "self_attn.q_norm.weight", "attn_q_norm.weight"
  ),
  "attention/k_norm/scale": _layer(
    "self_attn.k_norm.weight", "attn_k_norm.weight"
  ),
  "attention/o/weight": _layer("self_attn.o_proj.weight", "attn_output.weight"),
  "mlp_norm/scale": _layer(
    "post_attention_layernorm.weight", "ffn_norm.weight"
  ),
  "mlp/gate/weight": _layer("mlp.gate_proj.weight", "ffn_gate.weight"),
  "mlp/up/weight": _layer("mlp.up_proj.weight", "ffn_up.weight"),
  "mlp/down/weight": _layer("mlp.down_proj.weight", "ffn_down.weight"),
}
# With post norms (Gemma), Hugging Face's post_attention_layernorm is the norm
# of attention's output, not the one in front of the MLP.
_POST_NORMS = {
  "attention_post_norm/scale": _layer(
    "post_attention_layernorm.weight", "post_attention_norm.weight"
  ),
  "mlp_norm/scale": _layer(
    "pre_feedforward_layernorm.weight", "ffn_norm.weight"
  ),
  "mlp_post_norm/scale": _layer(
    "post_feedforward_layernorm.weight", "post_ffw_norm.weight"
  ),
}
_MIXTRAL = _experts("block_sparse_moe", gate="w1", up="w3", down="w2")
_QWEN3_MOE = _experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")

# Redundant tensors that some files carry: rotary tables, and a copy of a tied
# embedding as head.
IGNORED = re.compile(
  r".*rotary_emb\.inv_freq|lm_head\.weight|output\.weight|rope_freqs\.weight"
)


def _rows(config: TransformerConfig) -> dict[str, Row]:
  """Returns path below a layer -> Row, for the layers of this config."""
  rows = dict(_IN_LAYER)
  if config.post_norms:
    rows |= _POST_NORMS
  if config.num_experts:
    rows |= _QWEN3_MOE if config.qk_norm else _MIXTRAL
  return rows


def tensors(config: TransformerConfig) -> list[Tensor]:
  """Lists every tensor of a checkpoint of this config, layer by layer."""
  rows = _rows(config)

  def tensor(path: str, spec: params.ParamSpec) -> Tensor:
    in_layer = re.fullmatch(r"layer_(\d+)/(.+)", path)
    layer = int(in_layer[1]) if in_layer else 0
    row = rows[in_layer[2]] if in_layer else _OUTSIDE_LAYERS[path]
    parts = config.num_experts if "{expert}" in row.hugging_face else 1
    return Tensor(
      path,
      tuple(row.hugging_face.format(layer, expert=i) for i in range(parts)),
      row.gguf.format(layer),
      spec.axes,
      spec.shape,
      getattr(config, row.permuted_heads) if row.permuted_heads else 0,
      float(config.norm_offset and path.endswith("/scale")),
    )

  return [tensor(path, spec) for path, spec in params.specs(config).items()]


def check(
  expected: Mapping[str, tuple[int, ...]],
  actual: Mapping[str, tuple[int, ...]],
  source: str,
) -> None:
  """Compares names and shapes before any weight is read.

  Args:
    expected: name in the file -> shape that the config requires.
    actual: name -> shape of each tensor in the file.
    source: names the file in errors.

  Raises:
    ValueError: a tensor is missing, unexpected, or of another shape.
  """
  missing = [name for name in expected if name not in actual]
  if missing:
    raise ValueError(f"{source} lacks {join_names(missing)}")
  unexpected = [
    name
    for name in actual
    if name not in expected and not IGNORED.fullmatch(name)
  ]
  if unexpected:
    raise ValueError(
      f"{source} holds {join_names(unexpected)}, which this architecture does "
      "not use"
    )
  for name, shape in expected.items():
    if tuple(actual[name]) != tuple(shape):
      raise ValueError(
        f"{name} in {source} has shape {tuple(actual[name])}; the config "
        f"requires {tuple(shape)}"
      )
