"""Records what the `speculators` package computes, for tests to compare with.

python tests/tools/record_drafters.py [--output FOLDER] [VARIANT ...]

Builds a small random drafter a variant, saves it as the package does, and runs
it on random tokens and hidden states: expected.safetensors holds `tokens` [T],
`hidden` [T, n * M] and float32 `logits` [levels, fewer than T, V]. Entry i of
level j follows tokens 0 .. i + 1 + j, of which the last j are given as draft
tokens. Of a block drafter (fixtures/block_drafters) `logits` are [A, B, V], of
the slots of the blocks at `anchors` [A], given the text, and `confidence` is
[A, B]. Of a P-EAGLE (fixtures/parallel_drafters) `logits` are [N, V], of the
slots at `levels` [N] after the tokens `roots` [N].
Needs torch and speculators, which specdec itself does not. Verifiers are not
read: a drafter without an embedding or a head of its own is given random ones,
`embed` and `head`.
"""

import sys
from pathlib import Path

import torch
from absl import app, flags
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import (
  DFlash2DraftModel,
  DFlash2SpeculatorConfig,
)
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parent.parent / "fixtures" / "drafters"
LENGTH, LEVELS, SEED = 14, 3, 3
LAYER = {
  "vocab_size": 24,
  "hidden_size": 16,
  "intermediate_size": 20,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "num_hidden_layers": 1,
  "head_dim": 12,
  "max_position_embeddings": 64,
  "attention_bias": False,
}
# Name -> kind, its layer and options of its config.
VARIANTS = {
  "eagle3_llama": (
    "eagle3",
    LlamaConfig(**LAYER, rms_norm_eps=1e-5),
    {"draft_vocab_size": 10, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
  ),
  "eagle3_qwen3": (
    "eagle3",
    Qwen3Config(**LAYER | {"num_hidden_layers": 2}),
    {
      "draft_vocab_size": 24,
      "eagle_aux_hidden_state_layer_ids": [0, 4],
      "norm_before_residual": True,
      "fc_norm": True,
      "norm_output": True,
    },
  ),
  "eagle3_joint": (
    "eagle3",
    LlamaConfig(
      **LAYER,
      rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
      },
    ),
    {
      "draft_vocab_size": 10,
      "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
      "norm_before_fc": True,
    },
  ),
  "mtp_qwen3": ("mtp", Qwen3Config(**LAYER | {"num_hidden_layers": 4}), {}),
}
PARALLEL = {
  "peagle": (
    "peagle",
    LlamaConfig(**LAYER | {"num_hidden_layers": 2}, rms_norm_eps=1e-5),
    {
      "draft_vocab_size": 10,
      "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
      "norm_before_residual": True,
      "mask_token_id": 23,
    },
  ),
}
BLOCK = {
  "block_size": 4,
  "mask_token_id": 23,
  "aux_hidden_state_layer_ids": [1, 3],
}
BLOCKS = {
  "dflash_few": (
    "dflash",
    Qwen3Config(**LAYER | {"num_hidden_layers": 2}),
    {"draft_vocab_size": 10},
  ),
  "dflash_mixed": (
    "dflash",
    Qwen3Config(
      **LAYER | {"num_hidden_layers": 3},
      layer_types=["sliding_attention", "full_attention", "sliding_attention"],
      use_sliding_window=True,
      sliding_window=16,
    ),
    {"draft_vocab_size": 24},
  ),
  "dflash2": (
    "dflash2",
    Qwen3Config(**LAYER | {"num_hidden_layers": 2}),
    {
      "draft_vocab_size": 24,
      "conv_kernel_size": 3,
      "conv_group_size": 4,
      "selector_rank": 5,
      "selector_top_k": 6,
    },
  ),
  "dspark": (
    "dspark",
    LlamaConfig(**LAYER, rms_norm_eps=1e-5),
    {"draft_vocab_size": 24, "markov_rank": 5},
  ),
  "dspark_gated": (
    "dspark",
    Qwen3Config(
      **LAYER,
      layer_types=["sliding_attention"],
      use_sliding_window=True,
      sliding_window=16,
    ),
    {
      "draft_vocab_size": 10,
      "markov_rank": 5,
      "markov_head_type": "gated",
      "sample_from_anchor": False,
      "sliding_window_non_causal": True,
    },
  ),
  "dspark_rnn": (
    "dspark",
    Qwen3Config(**LAYER),
    {
      "draft_vocab_size": 24,
      "markov_rank": 5,
      "markov_head_type": "rnn",
      "enable_confidence_head": False,
    },
  ),
}
ANCHORS = 4, 7
CLASSES = {
  "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
  "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
  "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
  "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
  "mtp": (MTPDraftModel, MTPSpeculatorConfig),
  "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
}


def config_of(kind, layer, options):
  layer._attn_implementation = "eager"
  return CLASSES[kind][1](
    transformer_layer_config=layer,
    speculators_config=SpeculatorsConfig(
      algorithm=kind,
      default_proposal_method="greedy",
      proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=LEVELS)],
      verifier=VerifierConfig(
        name_or_path="somebody/target", architectures=["LlamaForCausalLM"]
      ),
    ),
    **options,
  )


def random_model(kind, layer, options):
  """A model of random weights, which drafts random tokens if not all."""
  torch.manual_seed(SEED)
  model = CLASSES[kind][0](config_of(kind, layer, options)).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      shape = parameter.shape
      noise = torch.randn(shape)
      parameter.copy_(1 + 0.3 * noise if len(shape) == 1 else 0.5 * noise)
  size = options.get("draft_vocab_size", layer.vocab_size)
  if size < layer.vocab_size:
    kept = torch.zeros(layer.vocab_size, dtype=torch.bool)
    kept[torch.randperm(layer.vocab_size)[:size]] = True
    ids = kept.nonzero()[:, 0]
    model.load_vocab_mappings(kept, ids - torch.arange(size))
  return model


def write(model, expected: dict, folder: Path) -> None:
  """Saves a model as the package does, and what it computed."""
  folder.mkdir(parents=True, exist_ok=True)
  model.save_pretrained(folder)
  (folder / "config.py").unlink(missing_ok=True)  # the package's own code
  save_file(expected, folder / "expected.safetensors")
  for file in folder.iterdir():
    file.chmod(0o644)  # safetensors writes for the owner alone
  print(folder.name, {key: tuple(x.shape) for key, x in expected.items()})


def watch(model) -> dict:
  """Returns what the model's forward pass will hand to its metrics."""
  core, seen = sys.modules[type(model).__module__], {}

  def compute_metrics(*args, **named):
    seen.update(dict(enumerate(args)) | named)
    return None, None

  core.compute_metrics = compute_metrics
  if hasattr(core, "selector_training_candidates"):  # those that it serves
    core.selector_training_candidates = lambda ids, _: (ids, None, None)
  return seen


def logits_of(seen: dict) -> torch.Tensor:
  """[1, A B, V] of a block drafter, -inf where a selector has no candidate."""
  if "candidate_logits" not in seen:
    return seen[0]
  none = torch.full_like(seen["unary_logits"], -torch.inf)
  ids, scores = seen["training_candidate_ids"], seen["candidate_logits"]
  return none.scatter(-1, ids, scores)


def record_parallel(name: str, folder: Path) -> None:
  kind, layer, options = PARALLEL[name]
  model = random_model(kind, layer, options)
  tokens = torch.randint(layer.vocab_size, (LENGTH,))
  hidden = torch.randn(LENGTH, 3 * layer.hidden_size)
  seen = watch(model)
  with torch.no_grad():
    model(
      hidden_states=hidden[None, :-1],
      input_ids=tokens[None, 1:],
      document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
      verifier_last_hidden_states=hidden[None, :-1, : layer.hidden_size],
      num_depths=LEVELS,
      down_sample_ratio=1.0,
      down_sample_ratio_min=1.0,
    )
  expected = {
    "tokens": tokens,
    "hidden": hidden,
    "logits": seen["logits"][0].contiguous(),
    "roots": seen["anchor_pos"] + 1,
    "levels": seen["depth"],
  }
  write(model, expected, folder)


def record_block(name: str, folder: Path) -> None:
  kind, layer, options = BLOCKS[name]
  layer._attn_implementation = "eager"
  model = random_model(kind, layer, BLOCK | options)
  tokens = torch.randint(layer.vocab_size, (LENGTH,))
  hidden = torch.randn(LENGTH, 2 * layer.hidden_size)
  is_anchor = torch.isin(torch.arange(LENGTH), torch.tensor(ANCHORS))
  seen = watch(model)
  with torch.no_grad():
    model(
      hidden_states=hidden[None],
      input_ids=tokens[None],
      loss_mask=is_anchor[None].long(),
      verifier_last_hidden_states=hidden[None, :, : layer.hidden_size],
      document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
      max_anchors=len(ANCHORS),
    )
  shape = len(ANCHORS), BLOCK["block_size"]
  expected = {
    "tokens": tokens,
    "hidden": hidden,
    "anchors": torch.tensor(ANCHORS),
    "logits": logits_of(seen).reshape(*shape, -1).clone(),
    "embed": model.embed_tokens.weight.detach().clone(),
    "head": model.lm_head.weight.detach().clone(),
  }
  if getattr(model, "confidence_head", None) is not None:
    expected["confidence"] = seen[2].reshape(shape).clone()
  write(model, expected, folder)


def record(name: str, folder: Path) -> None:
  kind, layer, options = VARIANTS[name]
  model = random_model(kind, layer, options)
  tokens = torch.randint(layer.vocab_size, (LENGTH,))
  count = len(options.get("eagle_aux_hidden_state_layer_ids", [0]))
  hidden = torch.randn(LENGTH, count * layer.hidden_size)
  logits = []
  model.lm_head.register_forward_hook(lambda *args: logits.append(args[2]))
  with torch.no_grad():
    if kind == "eagle3":
      model(
        hidden_states=hidden[None, :-1],
        input_ids=tokens[None, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        ttt_steps=LEVELS,
      )
    else:
      model(input_ids=tokens[None], hidden_states=hidden[None])
  shortest = min(x.shape[1] for x in logits)
  expected = {
    "tokens": tokens,
    "hidden": hidden,
    "logits": torch.stack([x[0, :shortest] for x in logits]).contiguous(),
  }
  if kind == "mtp":
    del model.verifier_lm_head  # as it does when it has read the verifier
    expected |= {
      "embed": model.embed_tokens.weight.detach().clone(),
      "head": model.lm_head.weight.detach().clone(),
    }
  write(model, expected, folder)


def record_pickled(folder: Path) -> None:
  """Writes what torch.save does: Medusa's heads, and tensors of all kinds."""
  sys.path.insert(0, str(FOLDER.parent.parent))
  import formats_test

  folder.mkdir(parents=True, exist_ok=True)
  arrays = formats_test.arrays_of(formats_test.MANIFESTS["Medusa"])
  heads = {name: torch.from_numpy(x) for name, x in arrays.items()}
  torch.save(heads, folder / "medusa_lm_head.pt")
  numbers = torch.arange(24).reshape(4, 6)
  torch.save(
    {
      "turned": numbers.to(torch.bfloat16).T[1:4],
      "steps": torch.arange(24)[3::5],
      "scalar": torch.tensor(1.5, dtype=torch.float16),
      "spread": torch.tensor([7.0]).expand(3, 2),
      "flags": torch.tensor([True, False]),
      "none": torch.empty(0, 3),
    },
    folder / "mixed.pt",
  )


def main(argv):
  output = Path(flags.FLAGS.output)
  for name in argv[1:] or [*VARIANTS, *BLOCKS, *PARALLEL]:
    if name in BLOCKS:
      record_block(name, output.parent / "block_drafters" / name)
    elif name in PARALLEL:
      record_parallel(name, output.parent / "parallel_drafters" / name)
    else:
      record(name, output / name)
  if len(argv) == 1:
    record_pickled(output.parent / "pickled")


if __name__ == "__main__":
  flags.DEFINE_string("output", str(FOLDER), "Folder to write.")
  app.run(main)
