"""Trains a small mixture of experts, to count which experts tokens choose.

python scripts/prepare_data.py --make=python --output=corpus
python scripts/train.py --config=configs/train/mixture.py --folder=runs/mixture
python scripts/count_experts.py --target=runs/mixture/best

Nothing balances its experts but that they begin alike.
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.models.config import TransformerConfig
from specdec.training.options import Options


def get_config() -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py."""
  model = TransformerConfig(
    vocab_size=4096,
    num_layers=4,
    width=192,
    mlp_width=128,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    qk_norm=True,
    num_experts=16,
    experts_per_token=2,
  )
  options = Options(
    steps=500,
    batch=8,
    sequence=256,
    learning_rate=2e-3,
    warmup=20,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=100,
    save_every=100,
    eval_sequences=32,
  )
  return config_dict.ConfigDict(
    dict(
      tokenizer="stdlib-11m",
      data="corpus/train",
      held_out="corpus/held_out",
      model=asdict(model),
      start="",
      options=asdict(options),
    )
  )
