r"""Trains an EAGLE-3 head for SmolLM2-135M-Instruct on the model's answers.

  python scripts/write_text.py --write=prompts \
    --target=smollm2-135m-instruct --count=1152 --temperature=1 \
    --max_new_tokens=64 --batch=128 --output=runs/invented
  python scripts/prepare_data.py --make=prompts \
    --questions=gsm8k_train.jsonl --passages=wikitext2_valid.txt \
    --code=corpus/train --count=300 --output=runs/prompts
  python scripts/write_text.py --target=smollm2-135m-instruct --chat \
    --prompt_file=runs/invented/prompts.jsonl \
    --prompt_file=runs/prompts/prompts.jsonl \
    --batch=64 --max_new_tokens=160 --output=runs/answers
  python scripts/write_text.py --target=smollm2-135m-instruct --chat \
    --prompt_file=runs/invented/held_out.jsonl \
    --prompt_file=runs/prompts/held_out.jsonl \
    --batch=64 --max_new_tokens=160 --output=runs/held_out
  python scripts/train.py --config=configs/train/smollm2_drafter.py \
    --folder=runs/smollm2_drafter

The head reads three of the 30 layers and has one layer of the target's shape.
It drafts the 8192 most frequent of 49152 tokens with the target's vocabulary
projection, since there is too little text to train another one.

On two cores the answers took 26 minutes (with other load) and the 900 steps 31
minutes: 1.63 tokens per target step on held-out answers
(docs/results/0.1.0/smollm2.md).
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.drafters.heads.head_config import HeadConfig
from specdec.training.drafting import Loss
from specdec.training.options import Options


def get_config() -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py."""
  head_config = HeadConfig(
    "eagle3",
    width=576,
    mlp_width=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    levels=2,
    head="shared",
    features=(2, 15, 27),
    vocabulary=8192,
  )
  options = Options(
    steps=900,
    batch=2,
    sequence=512,
    learning_rate=1e-3,
    warmup=30,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=100,
    save_every=50,
    eval_sequences=8,
  )
  return config_dict.ConfigDict(
    dict(
      target="smollm2-135m-instruct",
      data="runs/answers/answers.jsonl",
      held_out="runs/held_out/answers.jsonl",
      head_config=asdict(head_config),
      loss=asdict(Loss()),
      options=asdict(options),
      start="",
      cache="runs/hidden/smollm2",
      decoding=dict(k=3, prompts=8, length=64, new_tokens=64, temperature=0.0),
      samples=dict(count=0, prompt=32, temperature=1.0),
    )
  )
