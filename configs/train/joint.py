"""Trains a small target from scratch, with or without an auxiliary loss.

  python scripts/train.py --config=configs/train/joint.py:prophet \\
    --config.options.seed=0 --folder=runs/joint/prophet-0
  python scripts/compare_training.py --show=joint 'runs/joint/*'

The word after the colon is one of KINDS. See configs/train/target.py for the
corpus. All kinds see the same tokens in the same order, and runs with the same
seed have the same initial weights. Drafts use the target's head and its whole
vocabulary.

Measured seconds per step: none 0.22, layerskip 0.29, mtp 0.33, medusa 0.59,
prophet 0.63, with at most one core busy. A run of 400 steps takes 2 to 4
minutes; all five kinds with three seeds take half an hour, two at a time.
"""

from dataclasses import asdict

from ml_collections import config_dict

from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.training.drafting import Loss
from specdec.training.joint import LayerSkip
from specdec.training.options import Options

_LAYERS = 4
_HEADS = 5  # of Medusa
_SHARED = dict(width=128, head="shared")


def _loss(weight: float, decay: float = 1.0) -> Loss:
  return Loss("cross_entropy", token_weight=weight, decay=decay)


KINDS = {
  "none": dict(layer_skip=None),
  # Unweighted, as in the original implementation.
  "prophet": dict(
    head_config=HeadConfig("prophet", levels=4, **_SHARED), loss=_loss(1)
  ),
  # One module and weight 0.3, as in the report for its first two thirds.
  "mtp": dict(
    head_config=HeadConfig("mtp", levels=1, **_SHARED), loss=_loss(0.3)
  ),
  # The paper weights a sum over heads, 0.2 * sum of 0.8^j; this loss is a mean.
  "medusa": dict(
    head_config=HeadConfig("medusa", num_layers=0, levels=_HEADS, **_SHARED),
    loss=_loss(0.2 * sum(0.8**j for j in range(_HEADS)), decay=0.8),
  ),
  # As the paper's 1.5B from scratch: one exit below the last layer per step.
  "layerskip": dict(
    layer_skip=LayerSkip(dropout=0.1, exit_scale=0.2, rotation=_LAYERS - 1)
  ),
}


def get_config(kind: str = "prophet") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for a kind."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  model = TransformerConfig(
    vocab_size=4096,
    num_layers=_LAYERS,
    width=128,
    mlp_width=384,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    tied=True,
  )
  options = Options(
    steps=400,
    batch=8,
    sequence=128,
    learning_rate=2e-3,
    warmup=20,
    final_fraction=0.02,
    adam_b2=0.999,
    eval_every=100,
    save_every=50,
    eval_sequences=128,
  )
  return config_dict.ConfigDict(
    dict(
      tokenizer="stdlib-11m",
      data="corpus/train",
      held_out="corpus/held_out",
      model=asdict(model),
      options=asdict(options),
      # Evaluation by decoding: completes prompts of `length` tokens. At
      # temperature 0 a target this small repeats itself, which is too easy to
      # draft. LayerSkip drafts with its first exit_layer layers.
      decoding=dict(
        k=4,
        prompts=32,
        length=64,
        new_tokens=64,
        temperature=1.0,
        exit_layer=_LAYERS // 2,
      ),
      # An entry, though None, that makes the run one of joint training.
      **{name: entry and asdict(entry) for name, entry in KINDS[kind].items()},
    )
  )
