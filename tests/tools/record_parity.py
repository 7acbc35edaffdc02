"""Records what transformers computes, for the tests to compare with.

python tests/tools/record_parity.py [--output FOLDER] [VARIANT ...]

Builds a small random model a variant, runs it on random tokens and writes one
folder each: config.json and model.safetensors as transformers saves them, and
expected.safetensors with `tokens` [2, 24] and float32 `logits` [2, 24, V].
Needs torch and transformers, which specdec itself does not; the recorded
folders are part of the repository, so tests run without them. Encoder-decoders
have `source` [2, 20] and `source_length` [2] in it as well. Without names, all
variants are recorded. A new family is one row of VARIANTS.
"""

import itertools
import json
from pathlib import Path

import torch
import transformers
from absl import app, flags
from safetensors.torch import load_file, save_file

BATCH, LENGTH, VOCABULARY = 2, 24, 64
SEED = 20

# 0.25 rather than the usual 0.02: at this width attention would be flat and
# neither a rotary angle nor a mask would show in the logits.
COMMON = {
  "vocab_size": VOCABULARY,
  "hidden_size": 32,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "max_position_embeddings": 64,
  "initializer_range": 0.25,
  "tie_word_embeddings": False,
}
NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 500.0,
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}
GEMMA = {
  "num_key_value_heads": 2,
  "head_dim": 12,
  "query_pre_attn_scalar": 20,
  "tie_word_embeddings": True,
  "pad_token_id": None,
}
LLAMA4 = {
  **NO_TOKENS,
  "num_hidden_layers": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "intermediate_size": 24,
  "intermediate_size_mlp": 40,
  "attention_chunk_size": 5,
  "no_rope_layer_interval": 2,
  "interleave_moe_layer_step": 2,
  "num_local_experts": 4,
  "num_experts_per_tok": 2,
  "floor_scale": 4,
  "attn_scale": 0.5,
  "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
DEEPSEEK = {
  "num_hidden_layers": 3,
  "q_lora_rank": 20,
  "kv_lora_rank": 24,
  "qk_nope_head_dim": 12,
  "qk_rope_head_dim": 8,
  "v_head_dim": 16,
  "first_k_dense_replace": 1,
  "moe_intermediate_size": 16,
  "n_routed_experts": 8,
  "num_experts_per_tok": 3,
  "n_group": 4,
  "topk_group": 2,
  "num_nextn_predict_layers": 0,
  "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.5},
}
# Its scores are not divided by sqrt(d_kv).
T5 = {
  "d_model": 32,
  "d_kv": 12,
  "d_ff": 40,
  "num_layers": 2,
  "num_heads": 4,
  "relative_attention_num_buckets": 8,
  "relative_attention_max_distance": 14,
  "decoder_start_token_id": 0,
}
QWEN3_MOE = {
  "moe_intermediate_size": 16,
  "num_key_value_heads": 2,
  "head_dim": 12,
  "num_experts": 8,
  "num_experts_per_tok": 2,
}


GPT_OSS = {
  "num_hidden_layers": 3,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "sliding_window": 5,
  "num_local_experts": 6,
  "num_experts_per_tok": 2,
  "swiglu_limit": 1.0,
  "rope_parameters": YARN
  | {"beta_fast": 2.0, "beta_slow": 0.25, "truncate": False},
}


# Name -> model_type in transformers and options beyond COMMON.
VARIANTS = {
  # One key/value head a query head, as Llama 1 and 2 have it.
  "llama_mha": ("llama", {"rms_norm_eps": 1e-5}),
  # Of the wavelengths 6, 20, 63, ... the first is kept, the second lies in the
  # smooth passage (8 to 32) and the others are stretched.
  "llama_gqa_llama3": (
    "llama",
    {
      "num_key_value_heads": 2,
      "head_dim": 16,
      "tie_word_embeddings": True,
      "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
      },
    },
  ),
  "llama_linear": (
    "llama",
    {"num_key_value_heads": 1, "rope_parameters": LINEAR},
  ),
  # Of five pairs of dimensions the first turns 2.5 times and more, the last
  # less than once: kept, and stretched.
  "qwen3_yarn": (
    "qwen3",
    {
      "head_dim": 16,
      "num_key_value_heads": 2,
      "rope_parameters": YARN | {"beta_fast": 2.0, "beta_slow": 0.25},
    },
  ),
  # As DeepSeek derives the attention factor, and gpt-oss has the passage.
  "qwen2_yarn_mscale": (
    "qwen2",
    {
      "num_key_value_heads": 2,
      "rope_parameters": YARN
      | {
        "beta_fast": 2.0,
        "beta_slow": 0.25,
        "mscale": 2.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
      },
    },
  ),
  # Texts of 24 tokens are beyond the context of pre-training; a llama with it
  # is how others than Phi-3 have it.
  "llama_longrope": (
    "llama",
    {
      "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 4.0, 8.0],
      },
    },
  ),
  # Two layers of window 5 see 8 positions back: less than the text.
  "mistral_window": (
    "mistral",
    {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5},
  ),
  # The second layer of two has the window.
  "qwen2_window": (
    "qwen2",
    {
      "num_key_value_heads": 2,
      "use_sliding_window": True,
      "sliding_window": 5,
      "max_window_layers": 1,
    },
  ),
  "qwen3": (
    "qwen3",
    {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True},
  ),
  # As Phi-3 mini: short texts, of a model without and with longrope.
  "phi3_window": (
    "phi3",
    {"num_key_value_heads": 2, "sliding_window": 5, **NO_TOKENS},
  ),
  # As Phi-4 mini. The recorded texts are beyond the original context, so that
  # transformers, too, has the long factors.
  "phi3_longrope": (
    "phi3",
    {
      **NO_TOKENS,
      "num_key_value_heads": 2,
      "tie_word_embeddings": True,
      "original_max_position_embeddings": 16,
      "partial_rotary_factor": 0.75,
      "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.2],
        "long_factor": [1.5, 2.0, 4.0],
      },
    },
  ),
  "phi3_longrope_short": (
    "phi3",
    {
      **NO_TOKENS,
      "original_max_position_embeddings": 64,
      "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.2, 1.4],
        "long_factor": [1.5, 2.0, 4.0, 8.0],
      },
    },
  ),
  "olmo2": (
    "olmo2",
    {
      **NO_TOKENS,
      "num_key_value_heads": 2,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
  ),
  # Layers 1 and 3 have no rotation; 3 has the window.
  "smollm3": (
    "smollm3",
    {
      "num_hidden_layers": 4,
      "num_key_value_heads": 2,
      "tie_word_embeddings": True,
      "no_rope_layer_interval": 2,
      "use_sliding_window": True,
      "sliding_window": 5,
      "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
      **NO_TOKENS,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
  ),
  # Matrices in float8 e4m3, a scale for each block of 128 by 128: transformers
  # dequantises them as well.
  "qwen3_fp8": (
    "qwen3",
    {
      "hidden_size": 128,
      "intermediate_size": 256,
      "num_hidden_layers": 1,
      "num_key_value_heads": 2,
      "head_dim": 32,
      "initializer_range": 0.1,
      "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
      },
    },
  ),
  # The caps of the released model, 50 and 30, would not show: these do.
  "gemma2": (
    "gemma2",
    GEMMA
    | {
      "sliding_window": 5,
      "attn_logit_softcapping": 2.0,
      "final_logit_softcapping": 3.0,
    },
  ),
  # Layers 0 and 1 have the window, 2 sees all, 3 has it again.
  "gemma3": (
    "gemma3_text",
    GEMMA
    | {
      "num_hidden_layers": 4,
      "sliding_window": 5,
      "sliding_window_pattern": 3,
      "rope_parameters": {
        "full_attention": LINEAR,
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
      },
    },
  ),
  # Its text only: the vision tower is in the file and stays unread.
  "gemma3_images": (
    "gemma3",
    {
      "text_config": COMMON
      | GEMMA
      | {
        "num_hidden_layers": 2,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_scaling": LINEAR,
      },
      "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
      },
      "mm_tokens_per_image": 4,
    },
  ),
  "mixtral": (
    "mixtral",
    {
      "intermediate_size": 24,
      "num_key_value_heads": 2,
      "num_local_experts": 4,
      "num_experts_per_tok": 2,
      "sliding_window": 5,
    },
  ),
  # A one-token pass of two rows reads four of eight experts.
  "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
  "qwen3_moe_normalized": (
    "qwen3_moe",
    QWEN3_MOE | {"norm_topk_prob": True, "num_experts_per_tok": 3},
  ),
  # Windows in layers 0 and 2; gates and ups beyond the limit.
  "gpt_oss": ("gpt_oss", GPT_OSS),
  # As it is published: experts in MXFP4.
  "gpt_oss_mxfp4": (
    "gpt_oss",
    GPT_OSS
    | {
      "hidden_size": 64,
      "intermediate_size": 32,
      "num_hidden_layers": 1,
      "quantization_config": {"quant_method": "mxfp4"},
    },
  ),
  # Chunks in layers 0 and 2, which rotate and are dense; queries of the others
  # grow at every fourth position.
  "llama4": ("llama4_text", LLAMA4),
  # Llama Guard 4, which has no experts.
  "llama4_dense": (
    "llama4_text",
    LLAMA4 | {"num_hidden_layers": 2, "moe_layers": [], "head_dim": 8},
  ),
  # Layer 0 is dense; two of four groups of experts are open to a token.
  "deepseek_v3": ("deepseek_v3", DEEPSEEK),
  # Queries of full rank, no dense layers, halves that turn.
  "deepseek_v3_plain": (
    "deepseek_v3",
    DEEPSEEK
    | {
      "num_hidden_layers": 2,
      "q_lora_rank": None,
      "rms_norm_eps": 1e-2,  # of low ranks it stays 1e-6
      "first_k_dense_replace": 0,
      "rope_interleave": False,
      "norm_topk_prob": False,
      "n_shared_experts": 2,
      "n_group": 1,
      "topk_group": 1,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
  ),
  # Gated delta rule in layers 0 and 2; three value heads share a key head. With
  # smaller heads transformers itself differs by 1e-4 between a pass over the
  # text and one a token: an output near 0 is normed.
  "qwen3_next": (
    "qwen3_next",
    {
      "num_hidden_layers": 4,
      "num_key_value_heads": 2,
      "head_dim": 16,
      "full_attention_interval": 2,
      "linear_num_value_heads": 6,
      "linear_num_key_heads": 2,
      "linear_key_head_dim": 16,
      "linear_value_head_dim": 16,
      "linear_conv_kernel_dim": 3,
      "moe_intermediate_size": 16,
      "shared_expert_intermediate_size": 20,
      "num_experts": 8,
      "num_experts_per_tok": 2,
      "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
      },
    },
  ),
  # Mamba-2 in layers 0, 1 and 3.
  "bamba": (
    "bamba",
    {
      **NO_TOKENS,
      "num_hidden_layers": 4,
      "num_key_value_heads": 2,
      "attn_layer_indices": [2],
      "mamba_n_heads": 8,
      "mamba_n_groups": 2,
      "mamba_d_state": 12,
      "mamba_chunk_size": 8,
      "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
  ),
  # 1.0: ReLU, a tied head and scaled logits; more layers here than there.
  "t5": ("t5", T5 | {"num_decoder_layers": 3}),
  # 1.1: a gated MLP and a head of its own.
  "t5_gated": (
    "t5",
    T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
  ),
  "mt5": ("mt5", T5),
}

_OUTPUT = flags.DEFINE_string(
  "output", "tests/fixtures/parity", "Folder that gets a folder a variant."
)


def in_float8(model, folder: Path, scheme: dict):
  """Writes a model in float8; returns what transformers reads of it."""
  del model.config.quantization_config
  model.save_pretrained(folder)
  arrays = load_file(folder / "model.safetensors")
  for name in [x for x in arrays if "_proj" in x]:
    weight = arrays[name]
    blocks = [-(-size // 128) for size in weight.shape]
    scale = torch.empty(blocks)
    for i, j in itertools.product(*map(range, blocks)):
      part = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
      scale[i, j] = part.abs().max() / 448  # the largest e4m3
      part /= scale[i, j]
    arrays[name] = weight.to(torch.float8_e4m3fn)
    arrays[f"{name}_scale_inv"] = scale
  rewrite(folder, arrays, scheme)
  return read_back(folder, transformers.FineGrainedFP8Config(dequantize=True))


def in_mxfp4(model, folder: Path, scheme: dict):
  """Writes experts in MXFP4; returns what transformers reads of them."""
  del model.config.quantization_config
  model.save_pretrained(folder)
  arrays = load_file(folder / "model.safetensors")
  numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  numbers = torch.cat([numbers, -numbers])
  for name in [x for x in arrays if "experts" in x and x.endswith("_proj")]:
    weight = arrays.pop(name).swapaxes(1, 2)  # [E, out, in]
    weight = weight.reshape(*weight.shape[:2], -1, 32)
    exponent = (weight.abs().amax(-1) / 6).log2().ceil()
    scaled = weight / 2 ** exponent[..., None]
    nearest = (scaled[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
    arrays[f"{name}_blocks"] = nearest[..., ::2] | nearest[..., 1::2] << 4
    arrays[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
  rewrite(folder, arrays, scheme)
  return read_back(folder, transformers.Mxfp4Config(dequantize=True))


def rewrite(folder: Path, arrays: dict, scheme: dict) -> None:
  """Writes weights and the scheme in which they are quantised."""
  save_file(arrays, folder / "model.safetensors", {"format": "pt"})
  path = folder / "config.json"
  config = json.loads(path.read_text()) | {"quantization_config": scheme}
  path.write_text(json.dumps(config, indent=2) + "\n")


def read_back(folder: Path, scheme):
  """Returns the model as transformers reads it."""
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder,
    dtype=torch.float32,
    attn_implementation="eager",
    quantization_config=scheme,
  ).eval()


def record(name: str, folder: Path) -> str:
  """Writes one variant's three files; returns a line about them."""
  torch.manual_seed(SEED)
  model_type, options = VARIANTS[name]
  with_encoder = "d_model" in options
  if with_encoder:
    options = {"vocab_size": VOCABULARY} | options
    kind = transformers.AutoModelForSeq2SeqLM
  elif "text_config" in options:
    kind = transformers.AutoModelForImageTextToText
  else:
    options = COMMON | options
    kind = transformers.AutoModelForCausalLM
  config = transformers.AutoConfig.for_model(model_type, **options)
  model = kind.from_config(
    config, dtype=torch.float32, attn_implementation="eager"
  )
  model.eval()
  inputs, quantized = {}, options.get("quantization_config")
  with torch.no_grad():
    if with_encoder and name != "t5":
      # It ties them where a file has none, whatever its config says.
      model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for weight in model.parameters():
      if (
        weight.ndim == 1 or not weight.any()
      ):  # norms and biases start as ones and zeros: hidden
        weight += 0.3 * torch.randn_like(weight)
      elif with_encoder:
        weight[:] = 0.2 * torch.randn_like(weight)
    for name_of, bias in model.named_buffers():
      if name_of.endswith("e_score_correction_bias"):
        bias += 0.3 * torch.randn_like(bias)
    if quantized:
      of_method = {"fp8": in_float8, "mxfp4": in_mxfp4}
      convert = of_method[quantized["quant_method"]]
      model = convert(model, folder, quantized)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    if with_encoder:
      source = torch.randint(VOCABULARY, (BATCH, 20))
      length = torch.tensor([20, 13])
      seen = (torch.arange(20)[None] < length[:, None]).long()
      inputs = {"source": source, "source_length": length}
      logits = model(
        input_ids=source,
        attention_mask=seen,
        decoder_input_ids=tokens,
        use_cache=False,
      ).logits
    else:
      logits = model(input_ids=tokens, use_cache=False).logits
  if not quantized:
    model.save_pretrained(folder)
  (folder / "generation_config.json").unlink(missing_ok=True)
  arrays = {"tokens": tokens} | inputs
  arrays = {name: x.to(torch.int32) for name, x in arrays.items()}
  save_file(
    arrays | {"logits": logits.contiguous()}, folder / "expected.safetensors"
  )
  for file in folder.iterdir():
    file.chmod(0o644)  # safetensors writes for the owner alone
  size = sum(file.stat().st_size for file in folder.iterdir())
  return f"{size / 1e3:.0f} kB, logits of deviation {logits.std():.2f}"


def main(argv):
  transformers.utils.logging.disable_progress_bar()
  print(f"torch {torch.__version__}, transformers {transformers.__version__}")
  for name in argv[1:] or VARIANTS:
    print(f"{name}: {record(name, Path(_OUTPUT.value) / name)}")


if __name__ == "__main__":
  app.run(main)
