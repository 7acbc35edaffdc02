"""A cell: how a learned drafter goes from one token to the next.

A node of a draft has a stream, which its children are given; a committed token
gives its child what the target said of it instead. One cell is run by serve.py
when it drafts and by unroll.py when it is trained: the same weights through the
same functions, so the two cannot disagree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec import cache as kv
from specdec import sharding
from specdec.learned.recipe import Recipe
from specdec.models.attention import positions, visible
from specdec.models.config import TransformerConfig
from specdec.models.packing import look_up, project
from specdec.models.transformer import (
  Layer,
  Linear,
  Place,
  RMSNorm,
  rope_angles,
  softcap,
  weight,
)
from specdec.types import Array, KVCache, ModelOutput, Params, PyTree


class Lent(NamedTuple):
  """What a drafter uses of the target's weights."""

  embed: Array  # [V, M], or as models/packing.py packs it
  head: Array  # [n, M], the rows that it may guess


class View(NamedTuple):
  """What the tokens of one call see, and where their K/V goes."""

  slot: Array  # [B] of the first of them
  where: Array  # [B, T] positions
  mask: Array  # [B, T, S]


def view_of(
  length: Array, parents: Array | None, first: int, count: int, slots: int
) -> View:
  """Of nodes first .. first + count - 1 behind `length` committed positions.

  Args:
    parents: of all nodes so far, [first + count] or with rows; None: a chain.
  """
  nodes = first + count
  return View(
    length + first,
    positions(length, parents, nodes)[:, first:],
    visible(length, parents, nodes, slots)[:, first:],
  )


class Cell(NamedTuple):
  """A kind of drafter as pure functions of its weights.

  B rows, T tokens, W and W' widths of streams, n tokens it can guess.

  init(key) -> weights
  init_cache(batch, slots) -> KVCache, without layers where it has none
  read(weights, output) -> [B, T, W']: a child's stream, from a ModelOutput
  step(weights, lent, tokens [B, T], streams, layers, view, depth, own)
    -> (streams [B, T, W], layers). `streams` are the parents', or what `read`
    gave; `own` [B, T, M] is the target's stream at the exit for these very
    tokens (None where the kind has no exit). Of a cell that restarts, the call
    at depth 0 runs 2T positions, a start before every token.
  score(weights, lent, streams, depth) -> logits [B, T, n] of what follows
  """

  recipe: Recipe
  features: tuple[int, ...]  # DraftSpec.features
  ids: np.ndarray | None  # [n] tokens that it can guess; None: all
  vocab_size: int  # V
  init: Callable[[Array], PyTree]
  init_cache: Callable[[int, int], KVCache]
  read: Callable[[PyTree, ModelOutput], Array]
  step: Callable[..., tuple[Array, tuple]]
  score: Callable[[PyTree, Lent, Array, int], Array]

  @property
  def remembers(self) -> bool:
    """It has K/V of the committed text."""
    return self.recipe.num_layers > 0 and not self.recipe.restarts


class Blocks(nn.Module):
  """The drafter's own decoder layers."""

  recipe: Recipe
  place: Place = sharding.anywhere

  @nn.compact
  def __call__(self, x: Array, layers: tuple, view: View):
    config = self.recipe.layers
    angles = rope_angles(config, view.where, None)
    made = []
    for i in range(self.recipe.num_layers):
      layer = layers[i] if layers else None
      x, layer = Layer(config, self.place, name=f"layer_{i}")(
        x, layer, view.slot, angles, view.mask
      )
      made.append(layer)
    return x, tuple(made)


class Head(nn.Module):
  """A norm, then logits: rows of its own, or the target's."""

  recipe: Recipe
  target: TransformerConfig
  num_tokens: int

  @nn.compact
  def __call__(self, lent: Lent, x: Array) -> Array:
    x = RMSNorm(self.recipe.norm_epsilon, name="norm")(x)
    if self.recipe.head == "own":
      shape = (self.num_tokens, x.shape[-1])
      return project(weight(self, shape, x.dtype), x, jnp.float32)
    if x.shape[-1] != self.target.width:
      x = Linear(self.target.width, name="up")(x)
    return shared_score(lent, self.target, x)


def shared_score(lent: Lent, target: TransformerConfig, x: Array) -> Array:
  """Logits of the target's own head on what stands for its hidden states."""
  return softcap(project(lent.head, x, jnp.float32), target.logit_softcap)


def embedded(lent: Lent, tokens: Array) -> Array:
  """[B, T, M] the target's embeddings, its weights left as they are."""
  return look_up(lent.embed, tokens)


def cell_of(
  module: type[nn.Module],
  recipe: Recipe,
  target: TransformerConfig,
  ids: np.ndarray | None = None,
  place: sharding.Placement | None = None,
  features: tuple[int, ...] = (),
) -> Cell:
  """A cell from a Flax module with methods read, step and score.

  Args:
    module: made as module(recipe, target, num_tokens, place).
    ids: [n] tokens that it can guess; None: all.
    place: on a mesh; its weights lie whole on every chip.
    features: layers of the target whose entering streams `read` is given.

  Raises:
    ValueError: the recipe does not fit the target, or the ids the recipe.
  """
  recipe.check(target)
  if (0 if ids is None else len(ids)) != recipe.vocabulary:
    raise ValueError(
      f"the recipe says vocabulary = {recipe.vocabulary}, and "
      f"{'none' if ids is None else len(ids)} are given"
    )
  num_tokens = recipe.vocabulary or target.vocab_size
  made = module(recipe, target, num_tokens, place or sharding.anywhere)

  def call(method):
    def run(weights, *args):
      return made.apply({"params": weights}, *args, method=method)

    return run

  def once(mdl):
    """Every weight there is."""
    streams = jnp.zeros((1, 1, target.width))
    lent = Lent(
      jnp.zeros((1, target.width)), jnp.zeros((num_tokens, target.width))
    )
    output = ModelOutput(None, streams, (streams,) * len(features))
    given = mdl.read(output)
    own = streams if recipe.exits else None
    tokens = jnp.zeros((1, 1), jnp.int32)
    zero = jnp.zeros((1,), jnp.int32)
    count = 2 if recipe.restarts else 1
    view = view_of(zero, None, 0, count, count)
    for depth in range(recipe.levels):
      given, _ = mdl.step(lent, tokens, given, (), view, depth, own)
      mdl.score(lent, given, depth)
      view = view_of(zero, None, 0, 1, 1)

  def init(key):
    return jax.jit(lambda key: made.init(key, method=once))(key)["params"]

  def init_cache(batch, slots):
    config = recipe.layers
    cache = kv.init(
      batch,
      slots,
      recipe.num_layers,
      config.num_kv_heads,
      config.head_dim,
      jnp.float32,
    )
    if place is None:
      return cache
    layers = jax.tree.map(lambda x: place(x, *sharding.CACHE), cache.layers)
    return cache.replace(layers=layers)

  return Cell(
    recipe,
    features,
    ids,
    target.vocab_size,
    init,
    init_cache,
    *(call(method) for method in (module.read, module.step, module.score)),
  )


def lend(params: Params) -> Lent:
  """What the drafter uses of the target's weights, out of both."""
  target, draft = params
  table = target["head"] if "head" in target else target["embed"]
  head = draft["head"] if "head" in draft else table["weight"]
  return Lent(target["embed"]["weight"], head)


def spread(cell: Cell, logits: Array) -> Array:
  """[..., n] over the tokens it can guess to [..., V]; -inf elsewhere."""
  if cell.ids is None:
    return logits
  place = np.full((cell.vocab_size,), len(cell.ids), np.int32)
  place[cell.ids] = np.arange(len(cell.ids))
  none = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
  return jnp.concatenate([logits, none], axis=-1)[..., place]


def weights_of(cell: Cell, net: PyTree, target: PyTree) -> dict[str, Any]:
  """Params.draft of a drafter: its net, and the target's rows it may guess.

  Args:
    target: the target's parameters, packed or not.
  """
  draft = {"net": net}
  if cell.recipe.head == "shared" and cell.ids is not None:
    table = target["head"] if "head" in target else target["embed"]
    draft["head"] = look_up(table["weight"], jnp.asarray(cell.ids))
  return draft
