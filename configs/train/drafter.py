r"""Trains draft heads on the shipped target, with equal data and steps.

  python scripts/train.py --config=configs/train/drafter.py:prophet \
    --folder=runs/prophet

The word after the colon is one of KINDS. See configs/train/target.py for the
corpus. Each head has 0.15 to 0.6 M weights and drafts the 1536 most frequent of
the 4096 tokens, 88.5 % of the text. dflash, dflash2, jetspec, dspark, domino
and peagle write a draft in one pass. On two busy cores 600 steps took 7 to 22
minutes (docs/results/0.1.0/drafters.md). `head` and `shared` are early exits
with only a vocabulary projection, trained or the target's.

Names that begin with published_, and mtp, have the shapes of the papers' code,
which others can load: published_eagle and mtp with
--config.head_config.vocabulary=0. They have more weights: mtp 0.9 M,
published_eagle3 1.7 M, published_medusa 8.6 M, a vocabulary projection a head.
published_dflash, published_jetspec, published_dspark, published_domino and
published_dflash2 (1.6 to 1.8 M) draft all tokens by the target's projection;
published_peagle has 2.2 M.
Which layout is the plain name's was decided by tokens per target step after 300
steps of 4 x 256 tokens, seeds 0 to 2 (docs/training.md has the commands): the
published MTP had more than compact_mtp with every seed, the published EAGLE-3
fewer; the published Medusa more, in 26 times the weights, which every round
reads.
"""

from dataclasses import asdict, replace

from ml_collections import config_dict

from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.training.draft_losses import BlockLoss, Loss, TokenDrop
from specdec.training.options import Options

_FEW = 1536
_WIDE = dict(vocabulary=_FEW)
# Of the published layouts, which have the target's width; Medusa's draft from
# the whole vocabulary.
_PUBLISHED = dict(layout="published", width=384)


def _block(
  loss: Loss, mlp_width: int = 160, **options
) -> tuple[HeadConfig, Loss]:
  """Returns a block drafter of seven draft tokens and 0.6 M weights."""
  config = HeadConfig(
    "block",
    features=(2, 4, 6),
    levels=7,
    num_layers=2,
    mlp_width=mlp_width,
    block=BlockConfig(**options),
    **_WIDE,
  )
  return config, loss


def _published_block(loss: Loss, **options) -> tuple[HeadConfig, Loss]:
  """Returns a block drafter of the shapes that others load."""
  config = HeadConfig(
    "block",
    features=(1, 3, 5),
    levels=7,
    num_layers=2,
    head="shared",
    block=BlockConfig(mask_token=_MASK, **options),
    **_PUBLISHED,
  )
  return config, loss


_MASK = 188  # of the target's tokens the byte 0xFF, which no text has
# gamma = 4 for blocks of 7 or 8 tokens (DFlash, section 4; DSpark's code).
_GAMMA_4 = dict(decay=0.7788)
_STEPS = 600
_DSPARK = BlockLoss(cross_entropy_weight=0.1, confidence_weight=1.0)
# .1 CE + .9 L1, which is twice the total variation.
_OF_DSPARK = Loss(
  "total_variation", token_weight=1.8, block=_DSPARK, **_GAMMA_4
)
# The base loss goes as training does, from 1 to 0.
_OF_DOMINO = Loss(
  block=BlockLoss(base_weight=1.0, base_steps=_STEPS), **_GAMMA_4
)
# KL, and the selector's cross-entropy with the same weight, as in
# vllm-project/speculators.
_OF_DFLASH2 = Loss(block=BlockLoss(selector_weight=1.0), **_GAMMA_4)
KINDS = {
  "dflash": _block(Loss(**_GAMMA_4)),
  "jetspec": _block(Loss(**_GAMMA_4), causal=True),
  "dspark": _block(
    _OF_DSPARK,
    mlp_width=64,
    slots="next",
    successor="markov",
    rank=12,
    confidence=True,
  ),
  "domino": _block(
    _OF_DOMINO,
    mlp_width=64,
    slots="next",
    successor="gru",
    rank=16,
    state=32,
  ),
  "published_dflash": _published_block(Loss(**_GAMMA_4)),
  "published_dspark": _published_block(
    _OF_DSPARK,
    slots="next",
    successor="markov",
    rank=12,
    confidence=True,
  ),
  "published_jetspec": _published_block(Loss(**_GAMMA_4), causal=True),
  "published_domino": _published_block(
    _OF_DOMINO,
    slots="next",
    successor="gru",
    rank=16,
    state=32,
  ),
  "published_dflash2": _published_block(
    _OF_DFLASH2,
    successor="selector",
    rank=12,
    taps=2,
  ),
  # Taps and group are those of vllm-project/speculators, too.
  "dflash2": _block(
    _OF_DFLASH2,
    mlp_width=48,
    successor="selector",
    rank=12,
    taps=2,
  ),
  "eagle": (
    HeadConfig("eagle", head="shared", **_WIDE),
    Loss(token_weight=0.1, feature_weight=1.0),
  ),
  "eagle3": (HeadConfig("eagle3", features=(2, 4, 6), **_WIDE), Loss()),
  # Levels weigh the same, and drop.keep and drop.least are 0.7 and 0.2, as in
  # vllm-project/speculators.
  "peagle": (
    HeadConfig(
      "peagle",
      features=(2, 4, 6),
      levels=7,
      num_layers=2,
      mlp_width=128,
      **_WIDE,
    ),
    Loss(decay=1.0, drop=TokenDrop()),
  ),
  "published_peagle": (
    HeadConfig(
      "peagle",
      features=(2, 3, 5),
      levels=7,
      num_layers=2,
      mask_token=_MASK,
      **_WIDE,
      **_PUBLISHED,
    ),
    Loss(decay=1.0, drop=TokenDrop()),
  ),
  "published_eagle": (
    HeadConfig("eagle", head="shared", **_WIDE, **_PUBLISHED),
    Loss(token_weight=0.1, feature_weight=1.0),
  ),
  "published_eagle3": (
    HeadConfig("eagle3", features=(2, 3, 5), **_WIDE, **_PUBLISHED),
    Loss(),
  ),
  "mtp": (
    HeadConfig(
      "mtp",
      head="shared",
      feeds_back_norm=True,
      qk_norm=True,
      **_WIDE,
      **_PUBLISHED,
    ),
    Loss(),
  ),
  "compact_mtp": (HeadConfig("mtp", head="shared", **_WIDE), Loss()),
  "published_medusa": (
    HeadConfig("medusa", num_layers=0, levels=5, **_PUBLISHED),
    Loss(),
  ),
  "prophet": (HeadConfig("prophet", **_WIDE), Loss()),
  "medusa": (HeadConfig("medusa", num_layers=0, levels=5, **_WIDE), Loss()),
  "hydra": (HeadConfig("hydra", num_layers=0, levels=5, **_WIDE), Loss()),
  "exit": (HeadConfig("exit", exit_layer=1, **_WIDE), Loss()),
  "head": (HeadConfig("exit", exit_layer=1, num_layers=0, **_WIDE), Loss()),
  "shared": (
    HeadConfig(
      "exit", exit_layer=1, num_layers=0, head="shared", width=384, **_WIDE
    ),
    Loss(),
  ),
  "recycle": (
    HeadConfig("exit", exit_layer=1, feeds_back_hidden=True, **_WIDE),
    Loss(),
  ),
}


def _whole(head_config: HeadConfig, loss: Loss) -> Loss:
  """Returns the loss with every option that flags may set."""
  if head_config.kind == "block" and loss.block is None:
    return replace(loss, block=BlockLoss())
  if head_config.kind == "peagle" and loss.drop is None:
    return replace(loss, drop=TokenDrop())
  return loss


def get_config(kind: str = "prophet") -> config_dict.ConfigDict:
  """Returns the config of scripts/train.py for a kind of head."""
  if kind not in KINDS:
    raise ValueError(f"kind {kind!r} is unknown; known: {', '.join(KINDS)}")
  head_config, loss = KINDS[kind]
  options = Options(
    steps=_STEPS,
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
  config = config_dict.ConfigDict(
    dict(
      target="stdlib-11m",
      data="corpus/train",
      held_out="corpus/held_out",
      head_config=asdict(head_config),
      loss=asdict(_whole(head_config, loss)),
      options=asdict(options),
      start="",  # drafter with initial weights; "": random weights
      # Folder to cache the target's hidden states in; "": recomputes them.
      cache="",
      # Evaluation by decoding: completes prompts of `length` tokens.
      decoding=dict(k=4, prompts=16, length=64, new_tokens=64, temperature=0.0),
      # Trains on `count` texts sampled from the target after `prompt` tokens of
      # the corpus; 0: on the corpus itself.
      samples=dict(count=0, prompt=32, temperature=1.0),
    )
  )
  if config.loss.block and config.loss.block.base_steps:
    # As long as training, also where a flag sets that.
    config.loss.block.base_steps = config.options.get_ref("steps")
  return config
