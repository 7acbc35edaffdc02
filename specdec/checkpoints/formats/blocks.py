"""What the layouts of block drafters have in common: tensors and settings.

All of them have DFlash's tensors, 58 of a drafter of five layers (z-lab/dflash,
dflash/model.py); DSpark's heads are beyond that (deepseek-ai/DeepSpec,
deepspec/modeling/dspark/qwen3/modeling.py and markov_head.py), and so are
Domino's (vllm-project/speculators at 284081e, models/dflash/domino.py) and
DFlash2's convolutions and selector (z-lab/dflash at 1012959, dflash/model.py).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.checkpoints import hf_config
from specdec.checkpoints.formats import tables
from specdec.checkpoints.formats.stored import Target, layer_ids, typed
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.utils.spelling import check_choice

# markov_head_type -> BlockConfig.successor, and what it has beyond W1 and W2.
MARKOV = {"vanilla": "markov", "gated": "gated_markov", "rnn": "rnn_markov"}
_GRU = {
  "inputs": "prefix_gru.weight_ih_l0",
  "recurrent": "prefix_gru.weight_hh_l0",
  "narrow": "embed_proj.0.weight",
  "wide": "embed_proj.2.weight",
}
_MIXED = {"gated_markov": "gate", "rnn_markov": "joint"}
_SELECTOR = {
  "first": "predecessor_codebook",
  "second": "successor_codebook",
  "narrow": "hidden_projection.weight",
}
_CONVOLUTION = {
  "base": "base_kernel",
  "dynamic/weight": "kernel_projection.weight",
}
# Options of BlockConfig -> keys of a DFlash2, which has them all.
DFLASH2 = {
  "taps": "conv_kernel_size",
  "group": "conv_group_size",
  "rank": "selector_rank",
  "candidates": "selector_top_k",
}
LAYER_IDS = "target_layer_ids"
_NAMES = {"embed": "embed_tokens.weight", "head": "lm_head.weight"}
_QWEN = "Qwen3ForCausalLM"
_ALWAYS = "qk_norm", "qkv_bias", "norm_offset"  # of layers, one way only


def table(head_config: HeadConfig) -> dict[str, str]:
  """Returns path -> tensor name of a block drafter."""
  names = tables.layers(head_config, "layers.{}.")
  names |= {
    "gather/weight": "fc.weight",
    "context_norm/scale": "hidden_norm.weight",
    "norm/scale": "norm.weight",
  }
  for option, name in _NAMES.items():
    if getattr(head_config, option) == "own":
      names[tables.OWN[option]] = name
  block = head_config.block
  if block.taps:
    names |= _convolutions(head_config.num_layers)
  if block.successor == "gru":
    names |= {f"successor/{x}/weight": name for x, name in _GRU.items()}
  elif block.successor == "selector":
    for path, name in _SELECTOR.items():
      names[f"successor/{path}/weight"] = f"candidate_selector.{name}"
  elif block.successor != "none":
    names["successor/first/weight"] = "markov_head.markov_w1.weight"
    names["successor/second/weight"] = "markov_head.markov_w2.weight"
  for end in ("weight", "bias"):
    if mixed := _MIXED.get(block.successor):
      names[f"successor/{mixed}/{end}"] = f"markov_head.{mixed}_proj.{end}"
    if block.confidence:
      names[f"confidence_head/{end}"] = f"confidence_head.proj.{end}"
  return names


def _convolutions(num_layers: int) -> dict[str, str]:
  return {
    f"layer_{i}/{part}/{path}": f"layers.{i}.{part}.{name}"
    for i in range(num_layers)
    for part in ("attention_conv", "mlp_conv")
    for path, name in _CONVOLUTION.items()
  }


def kind_of(block: BlockConfig) -> str:
  """Returns the name under which a block drafter is published: dflash, dflash2,
  domino or dspark."""
  if block.successor == "none" and not block.confidence:
    return "dflash"
  return {"gru": "domino", "selector": "dflash2"}.get(block.successor, "dspark")


def owned(shapes: Mapping[str, Any]) -> dict[str, str]:
  """Returns HeadConfig.embed and .head by the tensors that are there."""
  return {
    option: "own" if name in shapes else "shared"
    for option, name in _NAMES.items()
  }


def decoder(
  config: Mapping[str, Any], source: str, architecture: str = _QWEN
) -> tuple[dict, tuple[int | None, ...], int]:
  """Returns what the config of its layers decides on.

  Args:
    architecture: of the model whose config it is.

  Returns:
    Fields of HeadConfig, the window of each layer, () if none has one, and V.
  """
  if architecture == _QWEN:
    check_choice(
      f"{source}: model_type",
      config.get("model_type", "qwen3"),
      ("qwen3",),
      " is not supported; supported",
    )
  layer = {**config, "architectures": [architecture]}
  parsed = hf_config.parse(layer, source, "float32")
  fields = tables.decoder_fields(dataclasses.replace(parsed, windows=()))
  for name in _ALWAYS:
    del fields[name]
  return fields, parsed.windows, parsed.vocab_size


def seen(
  windows: tuple[int | None, ...],
  causal: bool | None,
  block_size: int,
  source: str,
) -> dict[str, Any]:
  """Returns the fields of BlockConfig that say what a slot sees.

  Args:
    windows: of the layers, () if none has one.
    causal: None: the config does not say; then layers with a window are causal.

  Raises:
    ValueError: a window is smaller than the block.
  """
  if not any(windows):
    return {"causal": bool(causal)}
  window = next(filter(None, windows))
  if window < block_size:
    raise ValueError(
      f"{source} has sliding_window = {window} and block_size = {block_size}; "
      "the window must be at least as large as the block"
    )
  full = tuple(i for i, own in enumerate(windows) if own is None)
  fields = {"window": window, "full_layers": full}
  if causal is None and full:
    return fields | {"causal_window": True}
  return fields | {"causal": causal is not False}


def setting(
  config: Mapping[str, Any],
  nested: Mapping[str, Any],
  key: str,
  kind: type,
  source: str,
  *default: Any,
) -> Any:
  """Returns an entry that stands at the top level or in a nested object.

  Raises:
    ValueError: it is of another type, absent without a default, or two values
      differ.
  """
  values = [x[key] for x in (config, nested) if x.get(key) is not None]
  if len(values) == 2 and values[0] != values[1]:
    raise ValueError(
      f"{source} has {key} = {values[0]!r:.60} at the top level and "
      f"{values[1]!r:.60} below it; leave one"
    )
  return typed({key: values[0]} if values else {}, key, kind, source, *default)


def parse_dflash2(
  setting: Callable[[str], int],
  block_size: int,
  vocab_size: int,
  source: str,
) -> dict[str, Any]:
  """Returns the fields of BlockConfig that make a DFlash a DFlash2.

  Args:
    setting: returns the value of one of the keys in DFLASH2.

  Raises:
    ValueError: no reader runs such sizes.
  """
  fields = {option: setting(key) for option, key in DFLASH2.items()}
  _check_dflash2(fields, block_size, vocab_size, source)
  return fields | {"successor": "selector"}


def render_dflash2(
  block: BlockConfig, block_size: int, vocab_size: int, layout: str
) -> dict[str, int]:
  """Returns the keys that `parse_dflash2` reads; raises as it does."""
  fields = {option: getattr(block, option) for option in DFLASH2}
  _check_dflash2(fields, block_size, vocab_size, layout)
  return {key: fields[option] for option, key in DFLASH2.items()}


def _check_dflash2(
  fields: Mapping[str, int], block_size: int, vocab_size: int, place: str
) -> None:
  for option, most in (("taps", block_size), ("candidates", vocab_size)):
    if not 1 <= fields[option] <= most:
      raise ValueError(
        f"{place}: {DFLASH2[option]} = {fields[option]}; a DFlash2 with "
        f"block_size = {block_size} and {vocab_size} tokens has 1 to {most}"
      )


def features_of(
  left: list | None, low: int, source: str, target: Target | None
) -> tuple[int, ...]:
  """Returns HeadConfig.features of a list of layers whose output is read.

  Args:
    left: numbers of layers, -1 for the embeddings.
    low: the lowest that the layout knows.

  Raises:
    ValueError: it is no such list, or has the target's last layer, whose output
      some readers take before the final norm and some after it.
  """
  numbers = layer_ids(left, source, low, LAYER_IDS)
  if not numbers:
    raise ValueError(f"{source} has no layers in {LAYER_IDS}")
  features = tables.layers_entered(numbers)
  if target:
    check_last(features, target, source)
  return features


def check_last(features: Sequence[int], target: Target, source: str) -> None:
  """Refuses the output of the target's last layer.

  Args:
    features: layers whose inputs are read; L for what leaves the last of L.
  """
  last = target.num_layers - 1
  if target.num_layers in features:
    raise ValueError(
      f"{source} reads what leaves layer {last}, the target's last one: some "
      "readers take it before the final norm and some after it; accepted: "
      f"what leaves layers below {last}"
    )


def check_target(
  softcap: float | None, layers: int | None, target: Target | None, source: str
) -> None:
  """Refuses a target of another depth, or that bounds its logits otherwise."""
  if target is None:
    return
  if layers not in (None, target.num_layers):
    raise ValueError(
      f"{source} is for a target of {layers} layers; this one has "
      f"{target.num_layers}"
    )
  if (softcap or None) != target.logit_softcap:
    raise ValueError(
      f"{source} has final_logit_softcapping = {softcap}; the target, whose "
      f"vocabulary projection it takes, has {target.logit_softcap}"
    )


def check_written(
  head_config: HeadConfig, layout: str, wanted: Mapping[str, tuple]
) -> None:
  """Refuses options that a layout has no place for.

  Args:
    wanted: option of HeadConfig, or 'block.' and one of BlockConfig -> values.
  """
  block = head_config.block
  if block and block.successor != "selector":  # it convolves no others
    wanted = {**wanted, "block.taps": (0,)}
  for name, values in wanted.items():
    *below, field = name.split(".")
    value = getattr(block if below else head_config, field)
    if value not in values:
      raise ValueError(
        f"{name} = {value!r}: {layout} knows block drafters with {name} = "
        f"{' or '.join(map(repr, values))} only"
      )


def layers_left(
  head_config: HeadConfig, low: int, layout: str, target: Target
) -> list[int]:
  """Returns the layers whose output is read, as `features_of` takes them."""
  left = tables.layers_left(head_config.features)
  if min(left) < low:
    raise ValueError(
      f"features = {head_config.features}: {layout} names the layers that a "
      "stream leaves, and embeddings leave none"
    )
  check_last(
    head_config.features, target, f"features = {head_config.features}: {layout}"
  )
  return list(left)


def render_layers(head_config: HeadConfig) -> dict[str, Any]:
  """Returns the config.json of a decoder of a head's layers; raises as seen."""
  block, layers = head_config.block, head_config.layers
  if block.window:
    numbers = range(head_config.num_layers)
    windows = tuple(block.attention(i)[0] for i in numbers)
    seen(windows, None, head_config.block_size, "this block drafter")
    layers = dataclasses.replace(layers, windows=windows)
  return hf_config.render(layers)


def render(
  head_config: HeadConfig, target: Target, dtype: str
) -> dict[str, Any]:
  """Returns the config of the layers and the keys that layouts share."""
  config = render_layers(head_config)
  config |= {"vocab_size": target.vocab_size, "tie_word_embeddings": False}
  config |= {"hidden_act": "silu", "attention_bias": False}
  config["torch_dtype"] = dtype
  if target.max_length:
    config["max_position_embeddings"] = target.max_length
  return config | {
    "block_size": head_config.block_size,
    "mask_token_id": head_config.block.mask_token,
  }
