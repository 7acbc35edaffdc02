"""Sizes of a trained head: its weights, and those a draft token reads."""

import math

import jax
import jax.numpy as jnp
from jax.extend import core

from specdec.drafters.heads.draft_head import DraftHead, TargetWeights, view_of
from specdec.models.config import TransformerConfig
from specdec.types import ModelOutput, PyTree


def num_weights(net: PyTree) -> int:
  """Returns the head's number of weights, the target's left out."""
  return sum(leaf.size for leaf in jax.tree.leaves(net))


def step_weights(
  draft_head: DraftHead, target: TransformerConfig, logits: bool = True
) -> int:
  """Weights that a draft token but the first of a round reads, the rows of the
  target's head included.

  What `encode` reads once a round and the one row of an embedding are left out;
  so are the target's layers below an exit.

  Args:
    logits: False: only what advances the hidden state and the KV.
  """
  net = jax.eval_shape(draft_head.init, jax.random.key(0))
  leaves, form = jax.tree.flatten(net)
  stream = jnp.zeros((1, 1, target.width))
  output = ModelOutput(None, stream, (stream,) * len(draft_head.features))
  given = jax.eval_shape(draft_head.encode, net, output)
  if draft_head.head_config.resets_each_round:  # below the start, a node's own
    given = jax.ShapeDtypeStruct(
      (1, 1, draft_head.head_config.width), jnp.float32
    )
  exit_hidden = stream if draft_head.head_config.exits else None
  tokens, zero = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
  level = min(1, draft_head.head_config.levels - 1)

  def draft_token(head, *leaves):
    net = jax.tree.unflatten(form, leaves)
    target_weights = TargetWeights(jnp.zeros((1, target.width)), head)
    view = view_of(zero, None, 0, 1, 1)
    hidden = jnp.zeros(given.shape)
    stepped, _ = draft_head.step(
      net, target_weights, tokens, hidden, (), view, level, exit_hidden
    )
    if not logits:
      return stepped
    return draft_head.logits(net, target_weights, stepped, level)

  count = draft_head.head_config.vocabulary or target.vocab_size
  head = jax.ShapeDtypeStruct((count, target.width), jnp.float32)
  jaxpr = jax.make_jaxpr(draft_token)(head, *leaves).jaxpr
  encoded = {
    v for e in jaxpr.eqns for v in e.invars if not isinstance(v, core.Literal)
  }
  return sum(math.prod(v.aval.shape) for v in jaxpr.invars if v in encoded)
