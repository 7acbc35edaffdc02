"""What the tests of learned drafters share: one of every kind, never trained.

Random weights, sharpened so that distributions are far from flat and draft
tokens are kept now and then.
"""

import functools

import jax
import numpy as np

from specdec import drafters
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import transformer
from specdec.models.config import TransformerConfig

V = 17
IDS = np.array([0, 2, 3, 4, 6, 7, 9, 10, 12, 15, 16])
TARGET = TransformerConfig(
  vocab_size=V,
  num_layers=3,
  width=32,
  mlp_width=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
_SMALL = dict(width=16, mlp_width=24, num_heads=2, num_kv_heads=1, head_dim=8)
_EVERY = {
  "eagle": dict(head="shared"),
  "eagle3": dict(features=(1, 2, 3)),
  "mtp": dict(head="shared"),
  "prophet": dict(num_layers=2),
  "medusa": dict(num_layers=0),
  "hydra": dict(num_layers=0),
  "recycle": dict(kind="exit", exit_layer=2, feeds_back_hidden=True),
  "head": dict(kind="exit", exit_layer=1, num_layers=0, head="shared"),
}
KINDS = tuple(_EVERY)


def head_config(name: str, vocabulary: int = len(IDS), **changes) -> HeadConfig:
  """Of a name in KINDS; `recycle` and `head` are exits."""
  entries = dict(kind=name, vocabulary=vocabulary, **_SMALL)
  return HeadConfig(**entries | _EVERY[name] | changes)


def sharpened(weights, by):
  return jax.tree.map(lambda x: by * x if x.ndim == 2 else x, weights)


@functools.cache
def target():
  """(model, its weights)."""
  params = transformer.init_params(TARGET, jax.random.key(0))
  return transformer.model(TARGET), jax.tree.map(lambda x: 3 * x, params)


def draft_head(
  kind: str, full: bool = False, place=None
) -> draft_heads.DraftHead:
  """full: it can draft every token; else those of IDS."""
  made = head_config(kind, 0 if full else len(IDS))
  ids = None if full else IDS
  return drafters.LEARNED[made.kind](made, TARGET, ids, place)


@functools.cache
def weights(kind: str, full: bool = False):
  """Params.draft."""
  own = draft_head(kind, full)
  net = sharpened(own.init(jax.random.key(1)), 6)
  return draft_heads.weights_of(own, net, target()[1])
