"""Published block drafters in NumPy, by the names of their tensors.

Written from z-lab's and DeepSpec's forward passes and what they say of DFlash2
(vllm-project/vllm, pull request 52816), on purpose without a line of specdec.
MANIFESTS: the config.json, the tensors and what a slot sees, of small drafters
in every layout.
"""

from functools import partial

import numpy as np

from published_heads import HEAD_DIM, HEADS, KV_HEADS, attention, mlp, rms, silu

D, MLP, V, FEW, RANK, LAYERS = 8, 12, 16, 8, 3, 2
MASK, SIZE = 13, 4  # tokens and slots of a block
TAPS, GROUP, TOP = 2, 4, 5  # of DFlash2: kernel, channels that share it, choice
FULL, CAUSAL = (None, False), (None, True)


def backbone(layers, streams, d=D, mlp=MLP, q=HEADS * HEAD_DIM, hd=HEAD_DIM):
  """Name -> shape of DFlash's tensors, as of z-lab/dflash, dflash/model.py."""
  kv = KV_HEADS * hd if d == D else 8 * hd
  shapes = {
    "fc.weight": (d, streams * d),
    "hidden_norm.weight": (d,),
    "norm.weight": (d,),
  }
  for i in range(layers):
    shapes |= {
      f"layers.{i}.input_layernorm.weight": (d,),
      f"layers.{i}.self_attn.q_proj.weight": (q, d),
      f"layers.{i}.self_attn.k_proj.weight": (kv, d),
      f"layers.{i}.self_attn.v_proj.weight": (kv, d),
      f"layers.{i}.self_attn.o_proj.weight": (d, q),
      f"layers.{i}.self_attn.q_norm.weight": (hd,),
      f"layers.{i}.self_attn.k_norm.weight": (hd,),
      f"layers.{i}.post_attention_layernorm.weight": (d,),
      f"layers.{i}.mlp.gate_proj.weight": (mlp, d),
      f"layers.{i}.mlp.up_proj.weight": (mlp, d),
      f"layers.{i}.mlp.down_proj.weight": (d, mlp),
    }
  return shapes


def markov(kind, drafted=V):
  """Of the heads in deepseek-ai/DeepSpec, deepspec/modeling/dspark."""
  shapes = {
    "markov_head.markov_w1.weight": (V, RANK),
    "markov_head.markov_w2.weight": (drafted, RANK),
  }
  if kind == "gated":
    shapes["markov_head.gate_proj.weight"] = RANK, D + RANK
    shapes["markov_head.gate_proj.bias"] = (RANK,)
  if kind == "rnn":
    shapes["markov_head.joint_proj.weight"] = 3 * RANK, 2 * RANK + D
    shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
  return shapes


CONFIDENCE = {
  "confidence_head.proj.weight": (1, D + RANK),
  "confidence_head.proj.bias": (1,),
}
STATE = 5
DOMINO = {
  "prefix_gru.weight_ih_l0": (3 * STATE, D),
  "prefix_gru.weight_hh_l0": (3 * STATE, STATE),
  "embed_proj.0.weight": (RANK, D + STATE),
  "embed_proj.2.weight": (V, RANK),
}


def dflash2(layers, d=D, taps=TAPS, group=GROUP, rank=RANK, tokens=V):
  """Of the convolutions and the selector in z-lab/dflash, dflash/model.py."""
  shapes = {
    "candidate_selector.predecessor_codebook": (tokens, rank),
    "candidate_selector.successor_codebook": (tokens, rank),
    "candidate_selector.hidden_projection.weight": (rank, d),
  }
  for i in range(layers):
    for name in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
      shapes[f"{name}.base_kernel"] = 2, taps, d
      shapes[f"{name}.kernel_projection.weight"] = 2 * taps * d // group, d
  return shapes


CHOICE = {
  "conv_kernel_size": TAPS,
  "conv_group_size": GROUP,
  "selector_rank": RANK,
  "selector_top_k": TOP,
}
COPIES = {"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
LAYER = {
  "model_type": "qwen3",
  "hidden_size": D,
  "intermediate_size": MLP,
  "num_attention_heads": HEADS,
  "num_key_value_heads": KV_HEADS,
  "head_dim": HEAD_DIM,
  "num_hidden_layers": LAYERS,
  "vocab_size": V,
  "rms_norm_eps": 1e-06,
  "rope_theta": 10000.0,
  "hidden_act": "silu",
  "attention_bias": False,
  "max_position_embeddings": 64,
}
SLIDING = {
  "layer_types": ["sliding_attention", "full_attention"],
  "use_sliding_window": True,
  "sliding_window": 5,
  "max_window_layers": 2,
}
READS = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]}
BLOCK = {"block_size": SIZE}
ZLAB = LAYER | {"architectures": ["DFlashDraftModel"], "num_target_layers": 6}
DEEPSPEC = LAYER | READS | BLOCK
DEEPSPEC |= {
  "architectures": ["Qwen3DSparkModel"],
  "num_target_layers": 6,
  "num_anchors": 512,
  "tie_word_embeddings": False,
}
DSPARK = {
  "markov_rank": RANK,
  "markov_head_type": "vanilla",
  "enable_confidence_head": True,
  "confidence_head_with_markov": True,
}


def speculators(kind, layer, slots, **keys):
  """The config.json of version 0.9.0, as the package saves it."""
  names = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
  return {
    "architectures": [f"{names[kind]}DraftModel"],
    "speculators_model_type": kind,
    "speculators_version": "0.9.0",
    "speculators_config": {
      "algorithm": kind,
      "default_proposal_method": "greedy",
      "proposal_methods": [
        {
          "proposal_type": "greedy",
          "speculative_tokens": slots,
          "verifier_accept_k": 1,
          "accept_tolerance": 0.0,
        }
      ],
      "verifier": {
        "name_or_path": "somebody/target",
        "architectures": ["LlamaForCausalLM"],
      },
    },
    "tie_word_embeddings": False,
    "transformer_layer_config": layer,
    "draft_vocab_size": V,
    "block_size": SIZE,
    "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [1, 3, 4],
    "mask_token_id": MASK,
    "sliding_window_non_causal": False,
    "sample_from_anchor": kind == "dspark",
    **keys,
  }


NARROW = {"layer_types": ["sliding_attention"] * 2, "is_causal": False}
BACKBONE = backbone(LAYERS, 3)

# All of them read the streams that enter layers 1, 3 and 4 of their target.
# (config, name -> shape, what slots of each layer see: (window, causal))
MANIFESTS = {
  "DFlash": (
    ZLAB | BLOCK | {"dflash_config": READS},
    BACKBONE,
    (FULL, FULL),
  ),
  "DFlash of mixed layers": (  # as Qwen3.5's, all settings nested
    ZLAB | SLIDING | {"dflash_config": READS | BLOCK},
    BACKBONE,
    ((5, True), FULL),
  ),
  "DFlash with a window": (
    ZLAB | SLIDING | NARROW | READS | BLOCK,
    BACKBONE,
    ((5, False), (5, False)),
  ),
  "JetSpec": (
    ZLAB | BLOCK | {"dflash_config": READS | {"causal_head": True}},
    BACKBONE,
    (CAUSAL, CAUSAL),
  ),
  "Domino": (
    ZLAB
    | BLOCK
    | {
      "dflash_config": READS
      | {
        "projector_type": "domino",
        "emb_dim": RANK,
        "gru_hidden_dim": STATE,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
      },
    },
    BACKBONE | DOMINO,
    (FULL, FULL),
  ),
  "DFlash2": (
    ZLAB
    | SLIDING
    | NARROW
    | {
      "architectures": ["DFlash2DraftModel"],
      "dflash_config": READS | BLOCK | CHOICE,
    },
    BACKBONE | dflash2(LAYERS),
    ((5, False), (5, False)),
  ),
  "DeepSpec DFlash": (
    DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False},
    BACKBONE | COPIES,
    (FULL, FULL),
  ),
  "DeepSpec DSpark": (
    DEEPSPEC | DSPARK,
    BACKBONE | COPIES | markov("vanilla") | CONFIDENCE,
    (FULL, FULL),
  ),
  "DeepSpec gated": (
    DEEPSPEC
    | DSPARK
    | {"markov_head_type": "gated", "enable_confidence_head": False},
    BACKBONE | markov("gated"),
    (FULL, FULL),
  ),
  "DeepSpec rnn": (
    DEEPSPEC | DSPARK | {"markov_head_type": "rnn"},
    BACKBONE | markov("rnn") | CONFIDENCE,
    (FULL, FULL),
  ),
  "speculators dflash": (
    speculators("dflash", LAYER | SLIDING, SIZE - 1, draft_vocab_size=FEW),
    BACKBONE | {"lm_head.weight": (FEW, D)},
    ((5, True), FULL),
  ),
  "speculators dflash2": (
    speculators(
      "dflash2",
      LAYER | SLIDING,
      SIZE - 1,
      **{**CHOICE, "conv_kernel_size": 3, "sliding_window_non_causal": True},
    ),
    BACKBONE | dflash2(LAYERS, taps=3),
    ((5, False), FULL),
  ),
  "speculators dspark": (
    speculators("dspark", LAYER, SIZE, **DSPARK),
    BACKBONE | markov("vanilla") | CONFIDENCE,
    (FULL, FULL),
  ),
}


def convolve(x, base, dynamic):
  """Convolves slots x [S, d] by base [taps, d] + dynamic [S, taps, groups]."""
  y = np.zeros_like(x)
  for slot in range(len(x)):
    for tap in range(min(len(base), slot + 1)):
      kernel = base[tap] + np.repeat(dynamic[slot, tap], GROUP)
      y[slot] += kernel * x[slot - tap]
  return y


def convolved(w, name, x, sublayer):
  """A sublayer between two convolutions, where a drafter has them."""
  if f"{name}.base_kernel" not in w:
    return sublayer(x)
  base = w[f"{name}.base_kernel"]
  dynamic = x @ w[f"{name}.kernel_projection.weight"].T
  dynamic = dynamic.reshape(len(x), 2, base.shape[1], -1)
  y = sublayer(convolve(x, base[0], dynamic[:, 0]))
  return convolve(y, base[1], dynamic[:, 1])


def choose(w, logits, hidden, token):
  """Scores of the likeliest tokens after another; no other has any."""
  first, second, narrow = (
    w[f"candidate_selector.{name}"]
    for name in (
      *("predecessor_codebook", "successor_codebook"),
      "hidden_projection.weight",
    )
  )
  likeliest = np.argsort(-logits)[:TOP]
  scores = np.full_like(logits, -np.inf)
  term = second[likeliest] @ (first[token] * (narrow @ hidden))
  scores[likeliest] = logits[likeliest] + term
  return scores


def slots(w, embed, token, streams, sees):
  """[S, d] hidden states of the block after an anchor.

  Args:
    token: the anchor.
    streams: of the tokens before it, each [T, d].
  """
  context = np.concatenate(streams, axis=-1) @ w["fc.weight"].T
  context = rms(context, w["hidden_norm.weight"])
  x = embed[[token] + [MASK] * (SIZE - 1)]
  for i, (window, causal) in enumerate(sees):
    prefix = f"layers.{i}."
    y = rms(x, w[f"{prefix}input_layernorm.weight"])
    sees = dict(context=context, window=window, causal=causal)
    seen = partial(attention, w, prefix, **sees)
    x = x + convolved(w, f"{prefix}attention_conv", y, seen)
    y = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    x = x + convolved(w, f"{prefix}mlp_conv", y, partial(mlp, w, prefix))
  return rms(x, w["norm.weight"])


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def gru(w, x, state):
  """torch.nn.GRU without biases: the state after one more input."""
  reset, update, new = np.split(w["prefix_gru.weight_ih_l0"] @ x, 3)
  past = np.split(w["prefix_gru.weight_hh_l0"] @ state, 3)
  reset, update = sigmoid(reset + past[0]), sigmoid(update + past[1])
  new = np.tanh(new + reset * past[2])
  return (1 - update) * new + update * state


def drafted(manifest, w, target, tokens, streams, anchor):
  """[K, n] logits of the slots that draft, and [K] of confidence or None.

  Args:
    tokens: [T], the anchor's and those that are drafted after it given.
  """
  config, _, sees = manifest
  in_place = config["architectures"][0].startswith("DFlash")
  if "prefix_gru.weight_ih_l0" in w:
    in_place = False
  embed = w.get("embed_tokens.weight", target["embed"])
  head = w.get("lm_head.weight", target["head"])
  before = [x[:anchor] for x in streams]
  hidden = slots(w, embed, tokens[anchor], before, sees)[int(in_place) :]
  logits, state, confidence = [], np.zeros(RANK), []
  seen = np.zeros(STATE)
  for k, h in enumerate(hidden):
    out, features = head @ h, h
    if "markov_head.markov_w1.weight" in w:
      memory = w["markov_head.markov_w1.weight"][tokens[anchor + k]]
      features = np.concatenate([h, memory])
      if "markov_head.gate_proj.weight" in w:
        gate = w["markov_head.gate_proj.weight"] @ features
        memory = sigmoid(gate + w["markov_head.gate_proj.bias"]) * memory
      if "markov_head.joint_proj.weight" in w:
        x = np.concatenate([state, memory, h])
        x = w["markov_head.joint_proj.weight"] @ x
        x = x + w["markov_head.joint_proj.bias"]
        keep, new, memory = x[:RANK], x[RANK : 2 * RANK], x[2 * RANK :]
        state = sigmoid(keep) * state + (1 - sigmoid(keep)) * np.tanh(new)
        memory = np.tanh(memory)
      out = out + w["markov_head.markov_w2.weight"] @ memory
    if "prefix_gru.weight_ih_l0" in w:
      seen = gru(w, embed[tokens[anchor + k]], seen)
      x = w["embed_proj.0.weight"] @ np.concatenate([h, seen])
      if k:  # the first slot drafts alone
        out = out + w["embed_proj.2.weight"] @ silu(x)
    if "candidate_selector.predecessor_codebook" in w:
      out = choose(w, out, h, tokens[anchor + k])
    logits.append(out)
    if "confidence_head.proj.weight" in w:
      sure = w["confidence_head.proj.weight"] @ features
      confidence.append((sure + w["confidence_head.proj.bias"])[0])
  return np.array(logits), np.array(confidence) if confidence else None
