"""Trains a shipped target, 11 M parameters, on Python source.

The word after the colon is one of KINDS: `stdlib` on the standard library,

python scripts/prepare_data.py --make=python --output=corpus
python scripts/prepare_data.py --make=tokenizer --data=corpus/train
python scripts/train.py --config=configs/train/target.py --folder=runs/target

`python` for longer, on packages as well, with the shipped tokenizer:

pip install networkx xarray dask tornado
python scripts/prepare_data.py --make=python --output=corpus \\
  --packages=numpy,scipy,matplotlib,networkx,xarray,dask,jax,flax,optax,\\
orbax-checkpoint,ml-collections,absl-py --held_out_packages=chex,tornado
python scripts/train.py --config=configs/train/target.py:python \\
  --config.tokenizer=stdlib-11m --folder=runs/python
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.models.config import TransformerConfig
from specdec.training.options import Options

KINDS = {
  "stdlib": Options(
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
  ),
  "python": Options(
    steps=1100,
    batch=16,
    sequence=512,
    optimizer="muon",
    learning_rate=4e-3,
    warmup=50,
    final_fraction=0.02,
    dtype="bfloat16",
    eval_every=200,
    save_every=50,
    eval_sequences=32,
  ),
}


def get_config(kind: str = "stdlib") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for one of KINDS."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
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
  return config_dict.ConfigDict(
    dict(
      tokenizer="tokenizer",
      data="corpus/train",
      held_out="corpus/held_out",
      model=asdict(model),
      start="",  # checkpoint with initial weights; "": random weights
      options=asdict(KINDS[kind]),
    )
  )
