"""Trains the shipped encoder-decoder, or distils its draft from it.

  python scripts/prepare_data.py --make=python --output=corpus
  python scripts/prepare_data.py --make=pairs --data=corpus --output=pairs
  python scripts/train.py --config=configs/train/t5.py --folder=runs/t5
  python scripts/train.py --config=configs/train/t5.py:draft \\
    --folder=runs/t5_draft --config.target=runs/t5/best

It writes docstrings for Python functions, and bodies for signatures with
docstrings. Both models are T5's (arXiv:1910.10683) with a gated MLP and the
embedding as the head; their tokenizer is that of the shipped decoders.
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.models.config import TransformerConfig
from specdec.training.options import Options

# name -> encoder layers, decoder layers, width, MLP width, heads, their width
SIZES = {"target": (2, 4, 256, 320, 4, 64), "draft": (2, 1, 80, 192, 2, 32)}


def get_config(name: str = "target") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for 'target' or 'draft'."""
  if name not in SIZES:
    raise ValueError(f"{name!r} is unknown; known: {', '.join(SIZES)}")
  encoder_layers, num_layers, width, mlp_width, heads, head_dim = SIZES[name]
  model = TransformerConfig(
    vocab_size=4096,
    encoder_layers=encoder_layers,
    num_layers=num_layers,
    width=width,
    mlp_width=mlp_width,
    num_heads=heads,
    num_kv_heads=heads,
    head_dim=head_dim,
    activation="gelu_tanh",
    query_scalar=1.0,
    relative_buckets=32,
    tied=True,
    norm_epsilon=1e-6,
  )
  options = Options(
    steps=5000,
    batch=16,
    sequence=96,
    source=128,
    learning_rate=7e-4,
    warmup=100,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=250,
    save_every=50,
    eval_sequences=128,
  )
  config = config_dict.ConfigDict(
    dict(
      tokenizer="stdlib-11m",
      data="pairs/train.jsonl",
      held_out="pairs/held_out.jsonl",
      model=asdict(model),
      start="",  # checkpoint with initial weights; "": random weights
      options=asdict(options),
    )
  )
  if name == "draft":
    config.target, config.loss = "stdlib-t5-5m", "forward_kl"
    config.options.steps, config.options.learning_rate = 1500, 2e-3
    config.decoding = dict(
      k=4, prompts=32, length=1, new_tokens=64, temperature=0.0
    )
  return config
