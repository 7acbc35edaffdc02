r"""Trains drafters of an 8 B model with the settings that were published.

  python scripts/train.py --config=configs/train/published.py:eagle3 \
    --mesh=data:2,model:8 --folder=runs/eagle3
  python scripts/compile_training.py --topology=v5e:4x4 \
    --mesh=data:2,model:8 --config=configs/train/published.py:eagle3 \
    --config.target=preset:llama3-8b

The word after the colon is one of KINDS, each of which says where its numbers
are from. The target is Llama-3.1-8B-Instruct. Text must be brought: all of them
were trained on dialogues that the target, or a model like it, answered
(write_text.py), and counted losses on the answers alone; here they are counted
on all of the text. Learning rates decay by a cosine here, as Medusa's and those
of blocks did; EAGLE-3's decayed linearly. AdamW's beta_1 is 0.9 everywhere.
What a source counts in epochs is `options.steps` here, which is for the data to
say.

Sequences of a batch that are computed at once are batch / accumulate; `data`
must divide them. What a step takes of TPU slices: docs/results/tpu.md.
"""

from dataclasses import asdict, is_dataclass, replace

from ml_collections import config_dict

from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import presets
from specdec.models.rope_scaling import RopeScaling
from specdec.training.draft_losses import BlockLoss, Loss, TokenDrop
from specdec.training.masked import Masks
from specdec.training.options import Options

# Of one layer of the target, in the published layout.
_LAYER = dict(
  layout="published",
  width=4096,
  mlp_width=14336,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
)
# Rotary embeddings of the target.
_ROTARY = dict(rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", 8.0))
# Three streams, entering layers 2, L / 2 and L - 3 of 32; 32,000 of 128,256
# tokens; seven levels of training-time test, the next with 0.8 of the weight;
# rotary embeddings with base 10,000, whatever the target has:
# github.com/SafeAILab/EAGLE, eagle/traineagle3: config.json, main.py,
# modeling_llama_kv.py, cnets.py.
_EAGLE3 = HeadConfig(
  "eagle3", levels=7, features=(2, 16, 29), vocabulary=32_000, **_LAYER
)
_SOFT = Loss("forward_kl", decay=0.8)
# What no tokenizer of Llama 3 writes: the first reserved special token, as in
# github.com/NVIDIA-NeMo/Automodel, examples/speculative/p-eagle/
# llama_peagle_mvp.yaml. z-lab's mask token for Llama is not in its repository.
_MASK = 128_002
_DRAFT = "meta-llama/Llama-3.2-1B-Instruct"


def _block(levels: int, **options) -> HeadConfig:
  """Returns five layers that read five streams, evenly spaced from the one that
  leaves layer 1 to the one that leaves L - 3, with the target's embeddings,
  vocabulary projection and rotary embeddings.

  The layers are those of github.com/z-lab/dflash, dflash/model.py, and of
  DeepSpec and SpecForge below, whose configs are of Qwen3; sizes are the
  target's there as here.
  """
  return HeadConfig(
    "block",
    levels=levels,
    num_layers=5,
    features=(2, 9, 16, 23, 30),
    head="shared",
    block=BlockConfig(mask_token=_MASK, **options),
    **_LAYER,
    **_ROTARY,
  )


def _anchors(count: int, **options) -> BlockLoss:
  """Returns a loss at `count` anchors a sequence, 64 of them at a time, which
  is for memory alone."""
  return BlockLoss(anchors=count, at_once=64, **options)


# What the blocks below share, but for their batches.
_OF_BLOCKS = dict(
  steps=50_000,
  warmup=2_000,
  learning_rate=6e-4,
  final_fraction=0.0,
  adam_b2=0.999,
  weight_decay=0.0,
  clip=1.0,
)
# What those of NeMo Automodel have instead.
_NEMO = dict(adam_b2=0.95, final_fraction=0.1)
KINDS = {
  # ds_config.json there: AdamW with beta_2 0.95 and no decay, 5e-5 after 12,000
  # of 800,000 steps, clipped at 0.5, one sequence a GPU twice in a step, of at
  # most 2048 tokens. How many GPUs is not said: eight.
  "eagle3": dict(
    head_config=_EAGLE3,
    loss=_SOFT,
    options=dict(
      steps=800_000,
      warmup=12_000,
      batch=16,
      accumulate=2,
      sequence=2048,
      learning_rate=5e-5,
      final_fraction=0.0,
      adam_b2=0.95,
      weight_decay=0.0,
      clip=0.5,
    ),
  ),
  # github.com/sgl-project/SpecForge, examples/configs:
  # llama3.1-8b-eagle3-online.yaml: 1e-4, clipped at 0.5, one sequence a GPU of
  # at most 4096 tokens, ten epochs, seven levels.
  "specforge_eagle3": dict(
    head_config=_EAGLE3,
    loss=_SOFT,
    options=dict(
      steps=100_000,
      warmup=1_500,
      batch=8,
      sequence=4096,
      learning_rate=1e-4,
      final_fraction=0.0,
      weight_decay=0.0,
      clip=0.5,
    ),
  ),
  # github.com/sgl-project/SpecForge, scripts/train_mtp.py, its defaults: one
  # layer after a frozen target with the target's head, 6e-4, the first 4 % of
  # the steps warmup, clipped at 1, one sequence a GPU of at most 3072 tokens,
  # six epochs; rotary embeddings are the target's. One level, as in DeepSeek-V3
  # (arXiv:2412.19437, section 4.2).
  "mtp": dict(
    head_config=HeadConfig("mtp", head="shared", levels=1, **_LAYER, **_ROTARY),
    loss=Loss("cross_entropy"),
    options=dict(
      steps=50_000,
      warmup=2_000,
      batch=8,
      sequence=3072,
      learning_rate=6e-4,
      final_fraction=0.0,
      weight_decay=0.0,
      clip=1.0,
    ),
  ),
  # github.com/FasterDecoding/Medusa, README.md, Medusa-1: three heads of one
  # residual block, 1e-3 with a cosine, a tenth of the steps warmup, no decay, 4
  # GPUs x 8 sequences x 4 times in a step, of at most 2048 tokens, two epochs.
  # Head k weighs 0.8^k (arXiv:2401.10774, section 2.2.1).
  "medusa": dict(
    head_config=HeadConfig(
      "medusa", num_layers=0, levels=3, width=4096, layout="published"
    ),
    loss=Loss("cross_entropy", decay=0.8),
    options=dict(
      steps=1_000,
      warmup=100,
      batch=128,
      accumulate=4,
      sequence=2048,
      learning_rate=1e-3,
      final_fraction=0.0,
      adam_b2=0.999,
      weight_decay=0.0,
    ),
  ),
  # DFlash, arXiv:2602.06036, section 5 and appendix A.1: five layers; blocks of
  # 10, the anchor included, for Llama 3.1, and gamma 5 for blocks of 10; 512
  # anchors a sequence of at most 3072 tokens; AdamW, 6e-4, a cosine after 4 %
  # of the steps, clipped at 1, six epochs. Its batch is not said: that of
  # SpecForge, qwen3-8b-dflash-online.yaml, 8 GPUs x 4 sequences. Nor are beta_2
  # and the decay, which are PyTorch's and none there.
  "dflash": dict(
    head_config=_block(9),
    loss=Loss("cross_entropy", decay=0.8187, block=_anchors(512)),
    options=dict(batch=32, accumulate=4, sequence=3072, **_OF_BLOCKS),
  ),
  # D-PACE, arXiv:2605.18810, by github.com/NVIDIA-NeMo/Automodel,
  # examples/speculative/dflash/qwen3_dflash.yaml, with the `loss_type` and
  # `dpace_alpha` that it leaves commented out: DFlash with blocks of 16 and
  # D-PACE's weights of levels, smoothed by 0.5; beta_2 0.95, a cosine to a
  # tenth, 4 sequences a GPU. How many GPUs is not said: eight.
  "dpace": dict(
    head_config=_block(15),
    loss=Loss(
      "cross_entropy", block=_anchors(512, weighting="dpace", smoothing=0.5)
    ),
    options=dict(batch=32, accumulate=4, sequence=3072, **_OF_BLOCKS | _NEMO),
  ),
  # DFlash2, by qwen3_dflash2.yaml there: blocks of 16, gamma 7, 256 anchors,
  # convolutions of two taps and groups of 16, a selector of rank 256 among 16
  # candidates, whose loss weighs 1; 2 sequences a GPU, as many GPUs.
  "dflash2": dict(
    head_config=_block(15, successor="selector", rank=256, taps=2),
    loss=Loss(
      "cross_entropy",
      decay=0.8669,
      block=_anchors(256, selector_weight=1.0),
    ),
    options=dict(batch=16, accumulate=2, sequence=3072, **_OF_BLOCKS | _NEMO),
  ),
  # DSpark, arXiv:2607.05147, by github.com/deepseek-ai/DeepSpec,
  # config/dspark/dspark_qwen3_8b.py and deepspec/trainer: blocks of seven,
  # gamma 4, 0.1 of cross-entropy and 0.9 of the L1 distance (twice the total
  # variation), a Markov matrix of rank 256; 6e-4, a cosine after 4 % of the
  # steps, clipped at 1, 512 sequences of at most 4096 tokens, ten epochs. No
  # config is of Llama.
  "dspark": dict(
    head_config=_block(
      7, slots="next", successor="markov", rank=256, confidence=True
    ),
    loss=Loss(
      "total_variation",
      token_weight=1.8,
      decay=0.7788,
      block=_anchors(512, cross_entropy_weight=0.1, confidence_weight=1.0),
    ),
    options=dict(batch=512, accumulate=64, sequence=4096, **_OF_BLOCKS),
  ),
  # Domino, arXiv:2605.29707, by SpecForge, examples/configs:
  # qwen3-8b-domino-online.yaml: blocks of 16, gamma 7, a GRU of 1024, rank 256,
  # 256 anchors; 6e-4, a cosine after 4 % of the steps, clipped at 1, 8 GPUs x 2
  # sequences of at most 3072 tokens, six epochs. The weight of the loss without
  # the GRU's part falls from 1 to 0 over all steps, the other's rises from 0.
  "domino": dict(
    head_config=_block(16, slots="next", successor="gru", rank=256, state=1024),
    loss=Loss(
      "cross_entropy",
      decay=0.8669,
      block=_anchors(256, base_weight=1.0, base_steps=_OF_BLOCKS["steps"]),
    ),
    options=dict(batch=16, accumulate=2, sequence=3072, **_OF_BLOCKS),
  ),
  # JetSpec, arXiv:2606.18394, section 2.3 and appendix D: DFlash's layers with
  # a causal block of 16, the anchor included, 512 anchors, distilled without
  # weights of levels, 3e-4, 8 GPUs x 2 sequences. Temperature of distillation,
  # length, epochs, warmup and clipping are not said: 1, and DFlash's.
  "jetspec": dict(
    head_config=_block(15, causal=True),
    loss=Loss("forward_kl", decay=1.0, block=_anchors(512)),
    options=dict(
      batch=16,
      accumulate=2,
      sequence=3072,
      **_OF_BLOCKS | dict(learning_rate=3e-4),
    ),
  ),
  # P-EAGLE, arXiv:2602.01469, by SpecForge, examples/configs:
  # qwen3-8b-peagle-disaggregated.yaml: four layers after EAGLE-3's streams,
  # five levels, of which the next has slots after 0.8 of the roots, 0.2 at
  # least; the loss is a mean over slots, there only of those whose likeliest
  # token can be drafted; 1e-4, a cosine after 0.25 % of the steps, clipped at
  # 1, one GPU x 1 sequence of at most 4096 tokens, twenty epochs. The paper
  # trains a copy of the embeddings, too; SpecForge does not.
  "peagle": dict(
    head_config=HeadConfig(
      "peagle",
      levels=5,
      num_layers=4,
      features=(2, 16, 29),
      vocabulary=32_000,
      mask_token=_MASK,
      **_LAYER,
      **_ROTARY,
    ),
    loss=Loss("forward_kl", decay=1.0, drop=TokenDrop(0.8, 0.2)),
    options=dict(
      steps=400_000,
      warmup=1_000,
      batch=1,
      sequence=4096,
      learning_rate=1e-4,
      final_fraction=0.0,
      adam_b2=0.999,
      weight_decay=0.0,
      clip=1.0,
    ),
  ),
  # PARD, arXiv:2504.18583, by github.com/AMD-AGI/PARD,
  # config/train/example_llama3.yaml and pard/pard_train.py: a draft learns to
  # predict eight tokens of the text in one pass; the next level has slots
  # after 0.7 of the last one's rounds, 0.2 at least; 1e-5 throughout, 4
  # sequences a GPU twice in a step, of at most 512 tokens, four epochs. How
  # many GPUs is not said: eight. The file has Llama's template and a Qwen;
  # Llama's draft is that of amd/PARD-Llama-3.2-1B in README.md there.
  "pard": dict(
    tokenizer=_DRAFT,
    start=_DRAFT,
    model=replace(presets.get("llama3-1b"), mask_token=128_020),
    loss="cross_entropy",
    masks=Masks(0.7, 0.2, 8),
    options=dict(
      steps=10_000,
      warmup=0,
      batch=64,
      accumulate=2,
      sequence=512,
      learning_rate=1e-5,
      final_fraction=1.0,
      adam_b2=0.999,
      weight_decay=0.0,
      clip=1.0,
    ),
  ),
}


def get_config(kind: str = "eagle3") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for a published setting."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  published = dict(KINDS[kind])
  options = Options(
    dtype="bfloat16",
    eval_every=1000,
    save_every=500,
    **published.pop("options"),
  )
  if "head_config" in published:
    published |= dict(
      start="",  # drafter with initial weights; "": random weights
      cache="",  # folder of hidden states; "": recomputes them
    )
  config = config_dict.ConfigDict(
    dict(
      target="meta-llama/Llama-3.1-8B-Instruct",
      data="runs/answers/answers.jsonl",
      held_out="runs/held_out/answers.jsonl",
      options=asdict(options),
      decoding=dict(k=3, prompts=16, length=64, new_tokens=64, temperature=0.0),
      samples=dict(count=0, prompt=32, temperature=1.0),
      **{
        name: asdict(x) if is_dataclass(x) else x
        for name, x in published.items()
      },
    )
  )
  if kind == "domino":  # as long as training, also where a flag sets that
    config.loss.block.base_steps = config.options.get_ref("steps")
  return config
