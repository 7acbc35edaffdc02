"""A small target from scratch, with a second loss beside its own, or without.

  python scripts/train_joint.py --config=configs/train/joint.py:prophet \\
    --config.options.seed=0 --folder=runs/joint/prophet-0
  python scripts/compare_joint.py 'runs/joint/*'

The word after the colon is one of KINDS; the corpus comes as for
configs/train/target.py. All kinds see the same tokens in the same order, and
begin with the same weights where the seed is the same. Draft tokens are among
all tokens, by the target's own head.

Seconds of one of the 400 steps, measured: none 0.22, layerskip 0.29, mtp 0.33,
medusa 0.59, prophet 0.63, and no more than one core is busy. So a run takes 2
to 4 minutes, and all five with three seeds about half an hour, two at a time.
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
  "none": {},
  # The library that trains it so adds the two losses as they are.
  "prophet": dict(
    head_config=HeadConfig("prophet", levels=4, **_SHARED), loss=_loss(1)
  ),
  # The report's one module, and its first weight; .1 in the last third there.
  "mtp": dict(
    head_config=HeadConfig("mtp", levels=1, **_SHARED), loss=_loss(0.3)
  ),
  # .2 times the sum over heads of .8^j; here it is a mean that is weighed.
  "medusa": dict(
    head_config=HeadConfig("medusa", num_layers=0, levels=_HEADS, **_SHARED),
    loss=_loss(0.2 * sum(0.8**j for j in range(_HEADS)), decay=0.8),
  ),
  # As the paper's 1.5B from scratch: each step one exit below the last layer.
  "layerskip": dict(
    layer_skip=LayerSkip(dropout=0.1, exit_scale=0.2, rotation=_LAYERS - 1)
  ),
}


def get_config(kind: str = "prophet") -> config_dict.ConfigDict:
  """Entries of scripts/train_joint.py."""
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
      # How the drafter is evaluated: prompts of `length` tokens are completed.
      # At temperature 0 so small a target repeats itself, which any drafter
      # can. LayerSkip drafts with its first exit_layer layers.
      decoding=dict(
        k=4,
        prompts=32,
        length=64,
        new_tokens=64,
        temperature=1.0,
        exit_layer=_LAYERS // 2,
      ),
      **{name: asdict(entry) for name, entry in KINDS[kind].items()},
    )
  )
