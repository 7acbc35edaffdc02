"""What every tensor is called here, at Hugging Face and in a GGUF file.

Invariant: a tensor is known by one row of one table; supporting another family
means adding rows (and flags of TransformerConfig that switch them on), no code.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from specdec.models.config import TransformerConfig

Switch = Callable[[TransformerConfig], bool]


def _has(option: str) -> Switch:
  return lambda config: bool(getattr(config, option))


def _lacks(option: str) -> Switch:
  return lambda config: not getattr(config, option)


def _mixtral(config: TransformerConfig) -> bool:
  return config.num_experts > 0 and not config.qk_norm


def _qwen3_moe(config: TransformerConfig) -> bool:
  return config.num_experts > 0 and config.qk_norm


class Row(NamedTuple):
  """One kind of tensor; '{}' in a name stands for the layer's index.

  Where a Hugging Face name has '{expert}', its tensors are one here and in GGUF
  files, stacked along a first axis.
  """

  ours: str  # path in the parameter tree, joined by '/'
  hugging_face: str
  gguf: str
  shape: tuple[str, ...]  # names of sizes; `sizes` gives them numbers
  permuted_heads: str = ""  # config field counting the heads whose rows
  #                           llama.cpp interleaves, '' where it does not
  present: Switch = lambda config: True


class Tensor(NamedTuple):
  """One tensor that a checkpoint of a given config must hold."""

  ours: str
  hugging_face: tuple[str, ...]  # one name, or one an expert
  gguf: str
  axes: tuple[str, ...]  # of its dimensions, as sharding.Rules knows them
  shape: tuple[int, ...]
  permuted_heads: int  # 0: rows stand as Hugging Face stores them
  gguf_offset: float  # what GGUF files add: they hold 1 + scale, not scale

  @property
  def part_shape(self) -> tuple[int, ...]:
    """Shape under each of the Hugging Face names."""
    return self.shape[1:] if len(self.hugging_face) > 1 else self.shape


def _layer(ours: str, theirs: str, gguf: str, *shape: str, **options) -> Row:
  """A row of every layer; matrices and norms go by their modules' names."""
  if not ours.endswith("/bias"):
    ours += "/weight" if len(shape) > 1 else "/scale"
    theirs, gguf = theirs + ".weight", gguf + ".weight"
  theirs, gguf = "model.layers.{}." + theirs, "blk.{}." + gguf
  return Row("layer_{}/" + ours, theirs, gguf, shape, **options)


def _experts(present: Switch, block: str, **names: str) -> list[Row]:
  """Router and experts; `names` are those of an expert's matrices."""
  shape = ("experts", "width")
  router = f"{block}.gate"
  rows = [_layer("mlp/router", router, "ffn_gate_inp", *shape, present=present)]
  for ours, name in names.items():
    theirs, gguf = f"{block}.experts.{{expert}}.{name}", f"ffn_{ours}_exps"
    shape = ("width", "mlp") if ours == "down" else ("mlp", "width")
    shape = ("experts", *shape)
    rows.append(_layer(f"mlp/{ours}", theirs, gguf, *shape, present=present))
  return rows


TABLE = (
  Row(
    "embed/weight",
    "model.embed_tokens.weight",
    "token_embd.weight",
    ("vocab", "width"),
  ),
  _layer("attention_norm", "input_layernorm", "attn_norm", "width"),
  _layer(
    "attention/q",
    "self_attn.q_proj",
    "attn_q",
    "query",
    "width",
    permuted_heads="num_heads",
  ),
  _layer(
    "attention/k",
    "self_attn.k_proj",
    "attn_k",
    "key",
    "width",
    permuted_heads="num_kv_heads",
  ),
  _layer("attention/v", "self_attn.v_proj", "attn_v", "key", "width"),
  _layer(
    "attention/q/bias",
    "self_attn.q_proj.bias",
    "attn_q.bias",
    "query",
    present=_has("qkv_bias"),
  ),
  _layer(
    "attention/k/bias",
    "self_attn.k_proj.bias",
    "attn_k.bias",
    "key",
    present=_has("qkv_bias"),
  ),
  _layer(
    "attention/v/bias",
    "self_attn.v_proj.bias",
    "attn_v.bias",
    "key",
    present=_has("qkv_bias"),
  ),
  _layer(
    "attention/q_norm",
    "self_attn.q_norm",
    "attn_q_norm",
    "head",
    present=_has("qk_norm"),
  ),
  _layer(
    "attention/k_norm",
    "self_attn.k_norm",
    "attn_k_norm",
    "head",
    present=_has("qk_norm"),
  ),
  _layer("attention/o", "self_attn.o_proj", "attn_output", "width", "query"),
  # Hugging Face names what lies between attention and MLP by their number.
  _layer(
    "attention_post_norm",
    "post_attention_layernorm",
    "post_attention_norm",
    "width",
    present=_has("post_norms"),
  ),
  _layer(
    "mlp_norm",
    "pre_feedforward_layernorm",
    "ffn_norm",
    "width",
    present=_has("post_norms"),
  ),
  _layer(
    "mlp_norm",
    "post_attention_layernorm",
    "ffn_norm",
    "width",
    present=_lacks("post_norms"),
  ),
  _layer(
    "mlp_post_norm",
    "post_feedforward_layernorm",
    "post_ffw_norm",
    "width",
    present=_has("post_norms"),
  ),
  _layer(
    "mlp/gate",
    "mlp.gate_proj",
    "ffn_gate",
    "mlp",
    "width",
    present=_lacks("num_experts"),
  ),
  _layer(
    "mlp/up",
    "mlp.up_proj",
    "ffn_up",
    "mlp",
    "width",
    present=_lacks("num_experts"),
  ),
  _layer(
    "mlp/down",
    "mlp.down_proj",
    "ffn_down",
    "width",
    "mlp",
    present=_lacks("num_experts"),
  ),
  *_experts(_mixtral, "block_sparse_moe", gate="w1", up="w3", down="w2"),
  *_experts(
    _qwen3_moe, "mlp", gate="gate_proj", up="up_proj", down="down_proj"
  ),
  Row(
    "final_norm/scale", "model.norm.weight", "output_norm.weight", ("width",)
  ),
  Row(
    "head/weight",
    "lm_head.weight",
    "output.weight",
    ("vocab", "width"),
    present=_lacks("tied"),
  ),
)

# Tensors that files carry and that say nothing the config does not: rotary
# tables, and a copy of the embedding as head where the two are tied.
HARMLESS = re.compile(
  r".*rotary_emb\.inv_freq|lm_head\.weight|output\.weight|rope_freqs\.weight"
)


def sizes(config: TransformerConfig) -> dict[str, int]:
  """Numbers for the size names that rows use."""
  return {
    "vocab": config.vocab_size,
    "width": config.width,
    "mlp": config.mlp_width,
    "query": config.num_heads * config.head_dim,
    "key": config.num_kv_heads * config.head_dim,
    "head": config.head_dim,
    "experts": config.num_experts,
  }


def expected(config: TransformerConfig) -> list[Tensor]:
  """Every tensor of a checkpoint of this config, layer by layer."""
  number = sizes(config)

  def tensor(row: Row, layer: int) -> Tensor:
    heads = getattr(config, row.permuted_heads) if row.permuted_heads else 0
    parts = config.num_experts if "{expert}" in row.hugging_face else 1
    return Tensor(
      row.ours.format(layer),
      tuple(row.hugging_face.format(layer, expert=i) for i in range(parts)),
      row.gguf.format(layer),
      row.shape,
      tuple(number[size] for size in row.shape),
      heads,
      float(config.norm_offset and row.ours.endswith("/scale")),
    )

  rows = [row for row in TABLE if row.present(config)]
  once = [tensor(row, 0) for row in rows if "{}" not in row.ours]
  each = [
    tensor(row, layer)
    for layer in range(config.num_layers)
    for row in rows
    if "{}" in row.ours
  ]
  return once + each


# Beyond any model; what they bound sizes loops and tuples.
_MOST_LAYERS, _MOST_EXPERTS = 4096, 2**17


def check_counts(layers: int, experts: int) -> None:
  """Refuses what no file holds, before anything is made a layer or an expert.

  Args:
    experts: of a layer.

  Raises:
    ValueError: there are absurdly many of either.
  """
  if layers > _MOST_LAYERS:
    raise ValueError(
      f"num_layers = {layers:,}; at most {_MOST_LAYERS:,} are accepted"
    )
  if experts * layers > _MOST_EXPERTS:
    raise ValueError(
      f"num_experts = {experts:,} in each of {layers:,} layers; at most "
      f"{_MOST_EXPERTS:,} experts in all are accepted"
    )


def check(
  wanted: Mapping[str, tuple[int, ...]],
  found: Mapping[str, tuple[int, ...]],
  source: str,
) -> None:
  """Compares names and shapes before any weight is read.

  Args:
    wanted: shape of each tensor the config asks for, by the file's names.
    found: shape of each tensor the file holds.
    source: said in errors.

  Raises:
    ValueError: a tensor is missing, unknown, or of another shape.
  """
  missing = [name for name in wanted if name not in found]
  if missing:
    raise ValueError(f"{source} lacks {listed(missing)}")
  unknown = [
    name
    for name in found
    if name not in wanted and not HARMLESS.fullmatch(name)
  ]
  if unknown:
    raise ValueError(
      f"{source} holds {listed(unknown)}, which this architecture does not use"
    )
  for name, shape in wanted.items():
    if tuple(found[name]) != tuple(shape):
      raise ValueError(
        f"{name} in {source} has shape {tuple(found[name])}; the config makes "
        f"it {tuple(shape)}"
      )


def listed(items: Iterable[str], most: int = 3) -> str:
  """'a, b, c and 4 more': a list that fits into a sentence."""
  items = list(items)
  text = ", ".join(items[:most])
  rest = len(items) - most
  return text if rest <= 0 else f"{text} and {rest} more"


def nest(flat: Mapping[str, object]) -> dict:
  """{'a/b': x} to {'a': {'b': x}}."""
  tree: dict = {}
  for path, leaf in flat.items():
    *parents, last = path.split("/")
    node = tree
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = leaf
  return tree


def flatten(tree: Mapping, prefix: str = "") -> dict[str, object]:
  """{'a': {'b': x}} to {'a/b': x}."""
  flat: dict = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat |= flatten(value, f"{prefix}{key}/")
    else:
      flat[prefix + key] = value
  return flat
