"""What every tensor is called here, at Hugging Face and in a GGUF file.

Invariant: a tensor is known by one row of one table; supporting another family
means adding rows (and flags of TransformerConfig that switch them on), no code.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from specdec.models.config import TransformerConfig


def _always(config: TransformerConfig) -> bool:
  del config
  return True


def _untied(config: TransformerConfig) -> bool:
  return not config.tied


class Row(NamedTuple):
  """One kind of tensor; '{}' in a name stands for the layer's index."""

  ours: str  # path in the parameter tree, joined by '/'
  hugging_face: str
  gguf: str
  shape: tuple[str, ...]  # names of sizes; `sizes` gives them numbers
  permuted_heads: str = ""  # config field counting the heads whose rows
  #                           llama.cpp interleaves, '' where it does not
  present: Callable[[TransformerConfig], bool] = _always


class Tensor(NamedTuple):
  """One tensor that a checkpoint of a given config must hold."""

  ours: str
  hugging_face: str
  gguf: str
  shape: tuple[int, ...]
  permuted_heads: int  # 0: rows stand as Hugging Face stores them


_HF, _GGUF = "model.layers.{}.", "blk.{}."

TABLE = (
  Row(
    "embed/weight",
    "model.embed_tokens.weight",
    "token_embd.weight",
    ("vocab", "width"),
  ),
  Row(
    "layer_{}/attention_norm/scale",
    _HF + "input_layernorm.weight",
    _GGUF + "attn_norm.weight",
    ("width",),
  ),
  Row(
    "layer_{}/attention/q/weight",
    _HF + "self_attn.q_proj.weight",
    _GGUF + "attn_q.weight",
    ("query", "width"),
    permuted_heads="num_heads",
  ),
  Row(
    "layer_{}/attention/k/weight",
    _HF + "self_attn.k_proj.weight",
    _GGUF + "attn_k.weight",
    ("key", "width"),
    permuted_heads="num_kv_heads",
  ),
  Row(
    "layer_{}/attention/v/weight",
    _HF + "self_attn.v_proj.weight",
    _GGUF + "attn_v.weight",
    ("key", "width"),
  ),
  Row(
    "layer_{}/attention/o/weight",
    _HF + "self_attn.o_proj.weight",
    _GGUF + "attn_output.weight",
    ("width", "query"),
  ),
  Row(
    "layer_{}/mlp_norm/scale",
    _HF + "post_attention_layernorm.weight",
    _GGUF + "ffn_norm.weight",
    ("width",),
  ),
  Row(
    "layer_{}/mlp/gate/weight",
    _HF + "mlp.gate_proj.weight",
    _GGUF + "ffn_gate.weight",
    ("mlp", "width"),
  ),
  Row(
    "layer_{}/mlp/up/weight",
    _HF + "mlp.up_proj.weight",
    _GGUF + "ffn_up.weight",
    ("mlp", "width"),
  ),
  Row(
    "layer_{}/mlp/down/weight",
    _HF + "mlp.down_proj.weight",
    _GGUF + "ffn_down.weight",
    ("width", "mlp"),
  ),
  Row(
    "final_norm/scale",
    "model.norm.weight",
    "output_norm.weight",
    ("width",),
  ),
  Row(
    "head/weight",
    "lm_head.weight",
    "output.weight",
    ("vocab", "width"),
    present=_untied,
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
  }


def expected(config: TransformerConfig) -> list[Tensor]:
  """Every tensor of a checkpoint of this config, layer by layer."""
  number = sizes(config)

  def tensor(row: Row, layer: int) -> Tensor:
    heads = getattr(config, row.permuted_heads) if row.permuted_heads else 0
    return Tensor(
      row.ours.format(layer),
      row.hugging_face.format(layer),
      row.gguf.format(layer),
      tuple(number[size] for size in row.shape),
      heads,
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
