"""Trains the shipped target, 11 M parameters on the Python standard library.

python scripts/prepare_data.py --make=python --output=corpus
python scripts/prepare_data.py --make=tokenizer --data=corpus/train
python scripts/train.py --config=configs/train/target.py --folder=runs/target
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.models.config import TransformerConfig
from specdec.training.options import Options


def get_config() -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py."""
  model = TransformerConfig(
    vocab_size=4096,
    num_layers=6,
    width=384,
    mlp_width=1024,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    tied=True,
  )
  options = Options(
    steps=1300,
    batch=8,
    sequence=256,
    learning_rate=1e-3,
    warmup=50,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=100,
    save_every=50,
    eval_sequences=32,
  )
  return config_dict.ConfigDict(
    dict(
      tokenizer="tokenizer",
      data="corpus/train",
      held_out="corpus/held_out",
      model=asdict(model),
      start="",  # checkpoint with initial weights; "": random weights
      options=asdict(options),
    )
  )
