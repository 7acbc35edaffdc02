r"""Trains a drafter of SmolLM2-135M-Instruct on the model's own answers.

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
  python scripts/train.py --config=configs/train/smollm2_drafter.py:eagle3 \
    --folder=runs/smollm2_eagle3

The word after the colon is one of KINDS: `eagle3` has one layer of the target's
shape, `dspark` two, which write seven tokens in one pass. Both read three of
the 30 layers, and draft the 8192 most frequent of 49152 tokens with the
target's vocabulary projection, since there is too little text to train another
one.

On two cores the answers took 26 minutes (with other load) and 900 steps of
`eagle3` 31 minutes: 1.63 tokens per target step on held-out answers
(docs/results/0.1.0/smollm2.md).
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.training.draft_losses import BlockLoss, Loss
from specdec.training.options import Options

# Of the target's layers.
_LIKE_TARGET = dict(
  width=576,
  mlp_width=1536,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  head="shared",
  features=(2, 15, 27),
  vocabulary=8192,
)
# name -> the head, its loss and what differs of the options.
KINDS = {
  "eagle3": (HeadConfig("eagle3", levels=2, **_LIKE_TARGET), Loss(), {}),
  # The loss is that of DSpark's code, as in configs/train/drafter.py.
  "dspark": (
    HeadConfig(
      "block",
      levels=7,
      num_layers=2,
      block=BlockConfig(
        slots="next", successor="markov", rank=64, confidence=True
      ),
      **_LIKE_TARGET,
    ),
    Loss(
      "total_variation",
      token_weight=1.8,
      decay=0.7788,
      block=BlockLoss(cross_entropy_weight=0.1, confidence_weight=1.0),
    ),
    {"optimizer": "muon", "learning_rate": 1e-2},
  ),
}


def get_config(kind: str = "eagle3") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for one of KINDS."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  head_config, loss, changes = KINDS[kind]
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
      loss=asdict(loss),
      options=asdict(options) | changes,
      start="",
      cache="runs/hidden/smollm2",
      decoding=dict(k=3, prompts=8, length=64, new_tokens=64, temperature=0.0),
      samples=dict(count=0, prompt=32, temperature=1.0),
    )
  )
