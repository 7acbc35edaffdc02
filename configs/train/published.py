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
on all of the text. Learning rates decay by a cosine here, as Medusa's did;
EAGLE-3's decayed linearly. AdamW's beta_1 is 0.9 everywhere. What a source
counts in epochs is `options.steps` here, which is for the data to say.

Sequences of a batch that are computed at once are batch / accumulate; `data`
must divide them. Sizes on TPU slices: docs/sharding.md.
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.drafters.heads.head_config import HeadConfig
from specdec.training.drafting import Loss
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
# Three streams, entering layers 2, L / 2 and L - 3 of 32; 32,000 of 128,256
# tokens; seven levels of training-time test, the next with 0.8 of the weight;
# rotary embeddings with base 10,000, whatever the target has:
# github.com/SafeAILab/EAGLE, eagle/traineagle3: config.json, main.py,
# modeling_llama_kv.py, cnets.py.
_EAGLE3 = HeadConfig(
  "eagle3", levels=7, features=(2, 16, 29), vocabulary=32_000, **_LAYER
)
_SOFT = Loss("forward_kl", decay=0.8)
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
  # layer behind a frozen target with the target's head, 6e-4, the first 4 % of
  # the steps warmup, clipped at 1, one sequence a GPU of at most 3072 tokens,
  # six epochs; rotary embeddings are the target's. One level, as in DeepSeek-V3
  # (arXiv:2412.19437, section 4.2).
  "mtp": dict(
    head_config=HeadConfig(
      "mtp", head="shared", levels=1, rope_theta=500_000.0, **_LAYER
    ),
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
}


def get_config(kind: str = "eagle3") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for a published setting."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  published = KINDS[kind]
  options = Options(
    dtype="bfloat16", eval_every=1000, save_every=500, **published["options"]
  )
  return config_dict.ConfigDict(
    dict(
      target="meta-llama/Llama-3.1-8B-Instruct",
      data="runs/answers/answers.jsonl",
      held_out="runs/held_out/answers.jsonl",
      head_config=asdict(published["head_config"]),
      loss=asdict(published["loss"]),
      options=asdict(options),
      start="",  # drafter with initial weights; "": random weights
      cache="",  # folder of hidden states; "": recomputes them
      decoding=dict(k=3, prompts=16, length=64, new_tokens=64, temperature=0.0),
      samples=dict(count=0, prompt=32, temperature=1.0),
    )
  )
