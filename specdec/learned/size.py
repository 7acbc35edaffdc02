"""What a learned drafter is made of: weights in all, and read for one guess."""

import math

import jax
import jax.numpy as jnp
from jax.extend import core

from specdec.learned.cell import Cell, Lent, view_of
from specdec.learned.recipe import Recipe
from specdec.models.config import TransformerConfig
from specdec.types import ModelOutput, PyTree


def num_weights(net: PyTree) -> int:
  """Of its own; what it borrows of the target left out."""
  return sum(leaf.size for leaf in jax.tree.leaves(net))


def serving_bytes(
  recipe: Recipe, target: TransformerConfig, batch: int, length: int
) -> int:
  """Beside the weights: K/V of so many positions of its own, and the target's
  streams of a whole prompt, which it reads once.

  Args:
    length: of a row, prompt and output.
  """
  own = 0 if recipe.restarts else 2 * recipe.num_layers * recipe.num_kv_heads
  streams = 1 + len(recipe.features) + recipe.exits
  width = own * recipe.head_dim + streams * target.width
  return 4 * batch * length * width


def step_weights(cell: Cell, target: TransformerConfig) -> int:
  """Weights that a guess but the first of a round reads, the rows of the
  target's head included.

  What `read` takes once a round and the one row of an embedding are left out;
  so are the target's layers below an exit.
  """
  net = jax.eval_shape(cell.init, jax.random.key(0))
  leaves, form = jax.tree.flatten(net)
  stream = jnp.zeros((1, 1, target.width))
  output = ModelOutput(None, stream, (stream,) * len(cell.features))
  given = jax.eval_shape(cell.read, net, output)
  if cell.recipe.restarts:  # below the start, a node's own
    given = jax.ShapeDtypeStruct((1, 1, cell.recipe.width), jnp.float32)
  own = stream if cell.recipe.exits else None
  tokens, zero = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
  level = min(1, cell.recipe.levels - 1)

  def guess(head, *leaves):
    net = jax.tree.unflatten(form, leaves)
    lent = Lent(jnp.zeros((1, target.width)), head)
    view = view_of(zero, None, 0, 1, 1)
    streams = jnp.zeros(given.shape)
    made, _ = cell.step(net, lent, tokens, streams, (), view, level, own)
    return cell.score(net, lent, made, level)

  count = cell.recipe.vocabulary or target.vocab_size
  head = jax.ShapeDtypeStruct((count, target.width), jnp.float32)
  jaxpr = jax.make_jaxpr(guess)(head, *leaves).jaxpr
  read = {
    v for e in jaxpr.eqns for v in e.invars if not isinstance(v, core.Literal)
  }
  return sum(math.prod(v.aval.shape) for v in jaxpr.invars if v in read)
