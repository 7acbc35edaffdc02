"""Names of every parameter in Hugging Face checkpoints and GGUF files.

`specdec.models.params` lists the parameters of a config with their shapes; the
tables here map their paths. A new model family adds rows to a table.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from specdec.models import params
from specdec.models.config import TransformerConfig
from specdec.models.parts import GATED_DELTA, MAMBA2
from specdec.utils.spelling import join_names


class Tensor(NamedTuple):
  """One tensor that a checkpoint of a given config must hold."""

  path: str  # in the parameter tree, joined by '/'
  hugging_face: tuple[str, ...]  # one name, or one for each expert
  gguf: str
  axes: tuple[str, ...]  # logical axes, as in sharding.Rules
  shape: tuple[int, ...]
  permuted_heads: int  # 0: rows are in the order of Hugging Face
  gguf_offset: float  # added in GGUF files: 1 where they hold 1 + scale


def _projections(
  ours: str, hugging_face: str, gguf_end: str = ""
) -> dict[str, tuple[str, str]]:
  """Returns the names of the three matrices of an MLP, as the tables do."""
  return {
    f"{ours}/{name}": (f"{hugging_face}.{name}_proj", f"ffn_{name}{gguf_end}")
    for name in ("gate", "up", "down")
  }


# Name in the parameter tree -> names in Hugging Face and GGUF files, which add
# '.weight' or '.bias'. '{}' stands for an expert in Hugging Face, with a tensor
# for each; the tree and GGUF files stack them along a first axis.
_OUTSIDE_LAYERS = {
  "embed": ("model.embed_tokens", "token_embd"),
  "final_norm": ("model.norm", "output_norm"),
  "head": ("lm_head", "output"),
}
_DENSE = _projections("mlp", "mlp")
# By name below a layer.
_IN_LAYER = {
  "attention_norm": ("input_layernorm", "attn_norm"),
  "attention/q": ("self_attn.q_proj", "attn_q"),
  "attention/k": ("self_attn.k_proj", "attn_k"),
  "attention/v": ("self_attn.v_proj", "attn_v"),
  "attention/q_norm": ("self_attn.q_norm", "attn_q_norm"),
  "attention/k_norm": ("self_attn.k_norm", "attn_k_norm"),
  "attention/gate": ("self_attn.gate_proj", "attn_gate"),
  "attention/o": ("self_attn.o_proj", "attn_output"),
  "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
  **_DENSE,
  **_projections("shared", "mlp.shared_expert", "_shexp"),
  "shared_gate": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
}
# Whole paths and names of recurrent layers, below 'linear_attn' (Qwen3-Next) or
# 'mamba' (Bamba). Files hold several of them in one (stored_names.py).
_RECURRENT = {
  "recurrent/q/weight": "q_proj.weight",
  "recurrent/k/weight": "k_proj.weight",
  "recurrent/v/weight": "v_proj.weight",
  "recurrent/gate/weight": "z_proj.weight",
  "recurrent/decay/weight": "a_proj.weight",
  "recurrent/rate/weight": "b_proj.weight",
  "recurrent/q_conv/kernel": "q_conv1d.weight",
  "recurrent/k_conv/kernel": "k_conv1d.weight",
  "recurrent/v_conv/kernel": "v_conv1d.weight",
  "recurrent/q_conv/bias": "q_conv1d.bias",
  "recurrent/k_conv/bias": "k_conv1d.bias",
  "recurrent/v_conv/bias": "v_conv1d.bias",
  "recurrent/decay_bias": "dt_bias",
  "recurrent/log_decay": "A_log",
  "recurrent/skip": "D",
  "recurrent/norm/scale": "norm.weight",
  "recurrent/o/weight": "out_proj.weight",
}
RECURRENT = {GATED_DELTA: "linear_attn", MAMBA2: "mamba"}
_FEED_FORWARD = _projections("mlp", "feed_forward")
_BAMBA = _FEED_FORWARD | {
  "final_norm": ("model.final_layernorm", "output_norm"),
  "mlp_norm": ("pre_ff_layernorm", "ffn_norm"),
}
# With post norms (Gemma), Hugging Face's post_attention_layernorm is the norm
# of attention's output, not the one in front of the MLP.
_POST_NORMS = {
  "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
  "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
  "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}
_MIXTRAL = {
  "mlp/router": ("block_sparse_moe.gate", "ffn_gate_inp"),
  "mlp/gate": ("block_sparse_moe.experts.{}.w1", "ffn_gate_exps"),
  "mlp/up": ("block_sparse_moe.experts.{}.w3", "ffn_up_exps"),
  "mlp/down": ("block_sparse_moe.experts.{}.w2", "ffn_down_exps"),
}
_QWEN3_MOE = {
  "mlp/router": ("mlp.gate", "ffn_gate_inp"),
  **_projections("mlp", "mlp.experts.{}", "_exps"),
}
_DEEPSEEK = {
  **_QWEN3_MOE,
  **_projections("shared", "mlp.shared_experts", "_shexp"),
}
# Of latent attention. Files hold the maps to keys and to values as one
# (stored_names.py).
_LATENT = {
  "attention/q_down": ("self_attn.q_a_proj", "attn_q_a"),
  "attention/q_norm": ("self_attn.q_a_layernorm", "attn_q_a_norm"),
  "attention/kv_down": ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
  "attention/kv_norm": ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
  "attention/k_up": ("self_attn.k_b_proj", "attn_k_b"),
  "attention/v_up": ("self_attn.v_b_proj", "attn_v_b"),
}
# Files stack the experts of these, and hold gates and ups as one
# (stored_names.py).
_GPT_OSS = {
  "mlp/router": ("mlp.router", "ffn_gate_inp"),
  **_projections("mlp", "mlp.experts", "_exps"),
}
_LLAMA4 = {
  "mlp/router": ("feed_forward.router", "ffn_gate_inp"),
  **_projections("mlp", "feed_forward.experts", "_exps"),
  **_projections("shared", "feed_forward.shared_expert", "_shexp"),
}
# Parameters whose names in files have no '.weight' or '.bias'.
_WHOLE = {
  "attention/sink_logits": ("self_attn.sinks", "attn_sinks"),
  "mlp/choice_bias": ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
}

# Of T5: below the model, a layer of a stack, and its sublayers, which are
# numbered; the MLP is the last of them.
_T5 = {
  "embed": "shared",
  "head": "lm_head",
  "final_norm": "final_layer_norm",
  "relative_bias": "block.0.layer.0.SelfAttention.relative_attention_bias",
  "attention_norm": "0.layer_norm",
  "attention": "0.SelfAttention",
  "cross_norm": "1.layer_norm",
  "cross": "1.EncDecAttention",
  "mlp_norm": "{}.layer_norm",
  "mlp/gate": "{}.DenseReluDense.wi_0",
  "mlp/up": "{}.DenseReluDense.wi_1",
  "mlp/down": "{}.DenseReluDense.wo",
}

# Redundant tensors that some files carry: rotary tables, copies of a tied
# embedding, and a bias of cross-attention that T5 never reads.
IGNORED = re.compile(
  r".*rotary_emb\.inv_freq|lm_head\.weight|output\.weight|rope_freqs\.weight"
  r"|(en|de)coder\.embed_tokens\.weight"
  r"|decoder\..*\.EncDecAttention\.relative_attention_bias\.weight"
)


def _t5_name(path: str, config: TransformerConfig) -> str:
  """Returns the name in Hugging Face's files of T5, without its end."""
  if path in ("embed", "head"):
    return _T5[path]
  rest = path.removeprefix(params.ENCODER)
  in_encoder = rest != path
  layer = re.match(r"(layer|cross)_(\d+)/", rest)
  if layer is None:
    return f"{'encoder' if in_encoder else 'decoder'}.{_T5[rest]}"
  rest = rest[layer.end() :]
  if layer[1] == "cross":  # keys and values, which our encoder projects
    in_encoder, rest = False, f"cross/{rest}"
  stack, mlp = ("encoder", 1) if in_encoder else ("decoder", 2)
  sublayer, _, projection = rest.partition("/")
  if rest == "mlp/up" and not config.gated:
    name = "{}.DenseReluDense.wi"
  elif rest in _T5:
    name = _T5[rest]
  else:
    name = f"{_T5[sublayer]}.{projection}"
  return f"{stack}.block.{layer[2]}.layer.{name.format(mlp)}"


def tensors(config: TransformerConfig) -> list[Tensor]:
  """Lists every tensor of a checkpoint of this config, layer by layer."""
  in_layer, outside = dict(_IN_LAYER), dict(_OUTSIDE_LAYERS)
  kind = config.recurrence and config.recurrence.kind
  if kind == MAMBA2:
    in_layer |= _BAMBA
    outside |= {"final_norm": _BAMBA["final_norm"]}
  if config.post_norms:
    in_layer |= _POST_NORMS
  if config.latent:
    in_layer |= _LATENT
    if config.latent.query_rank:
      in_layer["attention/q"] = ("self_attn.q_b_proj", "attn_q_b")
  if config.expert_biases:
    in_layer |= _GPT_OSS
  elif config.route_inputs:
    in_layer |= _LLAMA4
  elif config.chunked:  # a dense Llama 4
    in_layer |= _FEED_FORWARD
  elif config.routing:
    in_layer |= _DEEPSEEK
  elif config.num_experts:
    in_layer |= _QWEN3_MOE if config.qk_norm else _MIXTRAL
  permuted = {"q/weight": config.num_heads, "k/weight": config.num_kv_heads}

  def tensor(path: str, spec: params.ParamSpec) -> Tensor:
    name, end = path.rsplit("/", 1)
    stored_end = ".bias" if end == "bias" else ".weight"
    below = path.partition("/")[2]
    if below in _WHOLE:
      in_layer[below], name, stored_end = _WHOLE[below], path, ""
    layer = re.match(r"layer_(\d+)/(?=recurrent/)", path)
    if layer:  # no GGUF file of these is read either
      name = f"{RECURRENT[kind]}.{_RECURRENT[path[layer.end() :]]}"
      name = f"model.layers.{layer[1]}.{name}"
      return Tensor(path, (name,), path, spec.axes, spec.shape, 0, 0.0)
    if config.encoder_layers:  # no GGUF file of these is read
      hugging_face, gguf = _t5_name(name, config), path
    elif layer := re.match(r"layer_(\d+)/", name):
      rows = in_layer
      if int(layer[1]) in config.dense_layers:
        rows = rows | (_FEED_FORWARD if config.route_inputs else _DENSE)
      hugging_face, gguf = rows[name[layer.end() :]]
      hugging_face = f"model.layers.{layer[1]}.{hugging_face}"
      gguf = f"blk.{layer[1]}.{gguf}"
    else:
      hugging_face, gguf = outside[name]
    parts = config.num_experts if "{}" in hugging_face else 1
    return Tensor(
      path,
      tuple(hugging_face.format(i) + stored_end for i in range(parts)),
      gguf + stored_end,
      spec.axes,
      spec.shape,
      permuted.get(path.partition("/attention/")[2], 0),
      float(config.norm_offset and end == "scale"),
    )

  return [tensor(path, spec) for path, spec in params.specs(config).items()]


def check(
  expected: Mapping[str, tuple[int, ...]],
  actual: Mapping[str, tuple[int, ...]],
  source: str,
  ignored: re.Pattern = IGNORED,
) -> None:
  """Raises ValueError for a missing, unexpected or misshapen tensor.

  Args:
    ignored: names of tensors that may be there without being expected.
  """
  missing = [name for name in expected if name not in actual]
  if missing:
    raise ValueError(f"{source} lacks {join_names(missing)}")
  unexpected = [
    name
    for name in actual
    if name not in expected and not ignored.fullmatch(name)
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
