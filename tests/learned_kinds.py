"""What the tests of learned drafters share: one of every kind, never trained.

Random weights, sharpened so that distributions are far from flat and draft
tokens are kept now and then.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
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
GEMMA = dataclasses.replace(
  TARGET,
  tied=True,
  windows=(4, None, 4),
  local_rope_theta=100.0,
  qk_norm=True,
  post_norms=True,
  norm_offset=True,
  scale_embedding=True,
  logit_softcap=5.0,
)
CONFIGS = {"llama": TARGET, "gemma": GEMMA}
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


def stumbling(drafter, narrow=False):
  """The same, with rounds that are not drafted.

  Of four rounds the second is undrafted in every row, the fourth in the rows
  whose length is even.

  Args:
    narrow: the target then runs the pending token alone; else the draft tokens
      stand beside it, out of use.
  """
  size = drafter.spec.max_nodes
  widths = tuple(sorted({1, size})) if narrow else (size,)

  def init(params, context, output):
    return drafter.init(params, context, output), jnp.zeros_like(context.length)

  def propose(params, state, context):
    own, turn = state
    draft, own = drafter.propose(params, own, context)
    stumbles = turn % 4 == 1
    stumbles |= (turn % 4 == 3) & (context.length % 2 == 0)
    return draft._replace(count=jnp.where(stumbles, 1, size)), (own, turn)

  def update(params, state, *rest):
    return drafter.update(params, state[0], *rest), state[1] + 1

  spec = drafter.spec._replace(widths=widths)
  return drafter._replace(spec=spec, init=init, propose=propose, update=update)
