"""A first drafter for SmolLM2-135M-Instruct, on its own answers.

  python scripts/training_prompts.py --questions=gsm8k_train.jsonl \
    --passages=wikitext2_valid.txt --code=corpus/train --count=360 \
    --output=runs/prompts
  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \
    --prompt_file=runs/prompts/prompts.jsonl --batch=64 --max_new_tokens=160 \
    --output=runs/answers
  python scripts/write_answers.py --target=smollm2-135m-instruct --chat \
    --prompt_file=runs/prompts/held_out.jsonl --batch=64 --max_new_tokens=160 \
    --output=runs/held_out
  python scripts/train_drafter.py --config=configs/train/smollm2_drafter.py \
    --folder=runs/smollm2_drafter

EAGLE-3 over three of the 30 layers, guessing among the 8192 most frequent of
49152 tokens with the target's own rows for them: a head of its own would have
to be learned from so little text.
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.learned.recipe import Recipe
from specdec.training.drafting import Loss
from specdec.training.options import Options


def get_config() -> config_dict.ConfigDict:
  """Entries of scripts/train_drafter.py."""
  recipe = Recipe(
    "eagle3",
    width=256,
    mlp_width=768,
    num_heads=4,
    num_kv_heads=1,
    head_dim=64,
    head="shared",
    features=(2, 15, 27),
    vocabulary=8192,
  )
  options = Options(
    steps=600,
    batch=4,
    sequence=256,
    learning_rate=1e-3,
    warmup=30,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=75,
    save_every=50,
    eval_sequences=16,
  )
  return config_dict.ConfigDict(
    dict(
      target="smollm2-135m-instruct",
      data="runs/answers/answers.jsonl",
      held_out="runs/held_out/answers.jsonl",
      recipe=asdict(recipe),
      loss=asdict(Loss()),
      options=asdict(options),
      start="",
      cache="runs/hidden/smollm2",
      decoding=dict(k=4, prompts=8, length=64, new_tokens=64, temperature=0.0),
      samples=dict(count=0, prompt=32, temperature=1.0),
    )
  )
