r"""Trains a drafter of SmolLM2-135M-Instruct on the model's own answers.

  python scripts/write_text.py --write=prompts --dtype=bfloat16 \
    --target=smollm2-135m-instruct --count=16384 --temperature=1 \
    --max_new_tokens=64 --batch=1024 --every=40 --output=runs/invented
  python scripts/prepare_data.py --make=prompts \
    --questions=gsm8k_train.jsonl --passages=wikitext2_valid.txt \
    --code=corpus/train --count=3000 --every=40 --output=runs/prompts
  python scripts/write_text.py --target=smollm2-135m-instruct --chat \
    --dtype=bfloat16 --prompt_file=runs/invented/prompts.jsonl \
    --prompt_file=runs/prompts/prompts.jsonl --max_prompt_tokens=256 \
    --batch=1024 --max_new_tokens=256 --output=runs/greedy
  # The same with --temperature=1 --seed=1 --output=runs/sampled, and with the
  # files held_out.jsonl and --output=runs/held_out.
  cat runs/greedy/answers.jsonl runs/sampled/answers.jsonl > runs/answers.jsonl
  python scripts/train.py --config=configs/train/smollm2_drafter.py:eagle3 \
    --folder=runs/smollm2_eagle3

The word after the colon is one of KINDS: `eagle3` has one layer of the target's
shape, `dspark` two, which write seven tokens in one pass. Both read three of
the 30 layers, and draft the 16384 most frequent of 49152 tokens with the
target's vocabulary projection.

On one H100, on which other training ran as well, the 17,695 answers of each
temperature took two to three minutes (3.38 and 3.58 million tokens), and 1200
steps of 32 x 512 tokens of both heads side by side five; `eagle3` with AdamW
and a learning rate of 1.5e-3. On two cores take --config.options.batch=4
--config.options.steps=2000 --config.cache=runs/states.
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
  vocabulary=16384,
)
# name -> the head and its loss.
KINDS = {
  "eagle3": (HeadConfig("eagle3", levels=4, **_LIKE_TARGET), Loss()),
  # The loss is that of DSpark's code, as in configs/train/drafter.py; the rest
  # what did best at equal weights (equal.py): a gated Markov head, as many
  # keys as queries, and a block at a quarter of the positions.
  "dspark": (
    HeadConfig(
      "block",
      levels=7,
      num_layers=2,
      block=BlockConfig(
        slots="next", successor="gated_markov", rank=64, confidence=True
      ),
      **_LIKE_TARGET | {"num_kv_heads": 9},
    ),
    Loss(
      "total_variation",
      token_weight=1.8,
      decay=0.7788,
      block=BlockLoss(
        anchors=128, cross_entropy_weight=0.1, confidence_weight=1.0
      ),
    ),
  ),
}


def get_config(kind: str = "eagle3") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for one of KINDS."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  head_config, loss = KINDS[kind]
  options = Options(
    steps=1200,
    batch=32,
    sequence=512,
    optimizer="muon",
    learning_rate=5e-3,
    warmup=30,
    final_fraction=0.02,
    adam_b2=0.999,
    dtype="bfloat16",
    eval_every=400,
    save_every=400,
    eval_sequences=8,
  )
  return config_dict.ConfigDict(
    dict(
      target="smollm2-135m-instruct",
      data="runs/answers.jsonl",
      held_out="runs/held_out/answers.jsonl",
      head_config=asdict(head_config),
      loss=asdict(loss),
      options=asdict(options),
      start="",
      cache="",
      decoding=dict(k=3, prompts=8, length=64, new_tokens=64, temperature=0.0),
      samples=dict(count=0, prompt=32, temperature=1.0),
    )
  )
