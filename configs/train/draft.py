"""Distills a shipped draft model from the shipped target.

  python scripts/train.py --config=configs/train/draft.py:1m --folder=runs/1m

The size after the colon is one of SIZES; `pard` is the 1m, taught to draft all
tokens in one pass. See configs/train/target.py for the corpus.
--config.target=runs/target/best selects another target.
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.models.config import TransformerConfig
from specdec.training.masked import Masks
from specdec.training.options import Options

# name -> (layers, width, MLP width, query heads, steps)
SIZES = {
  "0.3m": (1, 64, 192, 2, 300),
  "0.6m": (2, 96, 256, 3, 300),
  "1m": (2, 128, 384, 4, 600),
  "1.4m": (3, 160, 416, 5, 300),
  "pard": (2, 128, 384, 4, 600),
}
_MASK = 188  # the byte 0xff in the shipped tokenizer: no text has it


def get_config(size: str = "1m") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for a size."""
  if size not in SIZES:
    raise ValueError(f"size {size!r} is unknown; known: {', '.join(SIZES)}")
  layers, width, mlp_width, heads, steps = SIZES[size]
  model = TransformerConfig(
    vocab_size=4096,
    num_layers=layers,
    width=width,
    mlp_width=mlp_width,
    num_heads=heads,
    num_kv_heads=1,
    head_dim=32,
    tied=True,
    mask_token=_MASK if size == "pard" else None,
  )
  options = Options(
    steps=steps,
    batch=8,
    sequence=256,
    learning_rate=2e-3,
    warmup=30,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=100,
    save_every=50,
    eval_sequences=32,
  )
  return config_dict.ConfigDict(
    dict(
      tokenizer="stdlib-11m",
      data="corpus/train",
      held_out="corpus/held_out",
      target="stdlib-11m",
      loss="forward_kl",
      model=asdict(model),
      start="",  # checkpoint with initial weights; "": random weights
      options=asdict(options),
      # Evaluation by decoding: completes prompts of `length` tokens.
      decoding=dict(k=4, prompts=16, length=64, new_tokens=64, temperature=0.0),
      # Trains on `count` texts sampled from the target after `prompt` tokens of
      # the corpus; 0: on the corpus itself.
      samples=dict(count=0, prompt=32, temperature=1.0),
      # Shares of PARD (github.com/AMD-AGI/PARD): 0.7, at least 0.1.
      masks=asdict(Masks()) if size == "pard" else {},
    )
  )
