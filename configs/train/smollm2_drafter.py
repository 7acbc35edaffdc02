"""A first drafter for SmolLM2-135M-Instruct, on its own answers.

  python scripts/invent_prompts.py --target=smollm2-135m-instruct \
    --count=1152 --temperature=1 --max_new_tokens=64 --batch=128 \
    --output=runs/invented
  python scripts/training_prompts.py --questions=gsm8k_train.jsonl \
    --passages=wikitext2_valid.txt --code=corpus/train --count=300 \
    --output=runs/prompts
  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \
    --prompt_file=runs/invented/prompts.jsonl \
    --prompt_file=runs/prompts/prompts.jsonl \
    --batch=64 --max_new_tokens=160 --output=runs/answers
  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \
    --prompt_file=runs/invented/held_out.jsonl \
    --prompt_file=runs/prompts/held_out.jsonl \
    --batch=64 --max_new_tokens=160 --output=runs/held_out
  python scripts/train_drafter.py --config=configs/train/smollm2_drafter.py \
    --folder=runs/smollm2_drafter

EAGLE-3 over three of the 30 layers, its one layer of the target's own shape,
guessing among the 8192 most frequent of 49152 tokens with the target's own rows
for them: a head of its own would have to be learned from so little text.

On two cores the answers took 26 minutes beside other work and the 900 steps 31
minutes alone: 1.63 tokens a pass on held-out answers (docs/results.md).
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.drafters.heads.head_config import HeadConfig
from specdec.training.drafting import Loss
from specdec.training.options import Options


def get_config() -> config_dict.ConfigDict:
  """Entries of scripts/train_drafter.py."""
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
