"""A draft head: a trained drafter's step from one token to the next.

A node of a draft has a hidden state, which its children are given; a committed
token gives its child the encoded output of the target instead. One head is run
by serve.py when it drafts and by unroll.py when it is trained: the same weights
through the same functions, so the two cannot disagree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specdec import cache as kv
from specdec import sharding
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import attention, layouts, quantization
from specdec.models.attention import View
from specdec.models.config import TransformerConfig
from specdec.models.layouts import look_up, project
from specdec.models.linear import Linear, RMSNorm
from specdec.models.params import cast, layer_axes
from specdec.models.transformer import (
  MLP,
  Attention,
  Layer,
  Place,
  rope_angles,
  softcap,
  weight,
)
from specdec.models.weight_formats import BITS, WeightFormat
from specdec.types import Array, KVCache, ModelOutput, Params, PyTree
from specdec.utils.constructors import cached

GROUP = 256  # inputs that share a scale of integers, where no number is given


class TargetWeights(NamedTuple):
  """The target's weights that a head uses."""

  embed: Array  # [V, M], or as models/layouts.py packs it
  head: Array  # [n, M], the rows that it may draft


class DraftHead(NamedTuple):
  """A kind of trained drafter as pure functions of its weights.

  B rows, T tokens, W and W' widths of hidden states, n tokens it can draft.

  init(key) -> weights
  init_cache(batch, slots) -> KVCache, without layers where it has none
  encode(weights, output) -> [B, T, W']: a child's input, from a ModelOutput
  step(weights, target_weights, tokens [B, T], hidden, layers, view, depth,
      exit_hidden)
    -> (hidden [B, T, W], layers). `hidden` are the parents', or what `encode`
    returned; `exit_hidden` [B, T, M] is the target's residual stream at the
    exit layer for these very tokens (None where the kind has no exit). Of a
    head that resets each round, the call at depth 0 runs 2T positions, a start
    before every token.
  logits(weights, target_weights, hidden, depth) -> [B, T, n] of what follows
  """

  head_config: HeadConfig
  features: tuple[int, ...]  # DraftSpec.features
  ids: np.ndarray | None  # [n] tokens that it can draft; None: all
  target: TransformerConfig
  init: Callable[[Array], PyTree]
  init_cache: Callable[[int, int], KVCache]
  encode: Callable[[PyTree, ModelOutput], Array]
  step: Callable[..., tuple[Array, tuple]]
  logits: Callable[[PyTree, TargetWeights, Array, int], Array]

  @property
  def vocab_size(self) -> int:
    return self.target.vocab_size

  @property
  def has_kv_cache(self) -> bool:
    """Whether it has KV of the committed text."""
    return (
      self.head_config.num_layers > 0 and not self.head_config.resets_each_round
    )

  @property
  def start(self) -> int:
    """Position of the first token in its KV cache."""
    return int(self.head_config.skips_first)


class Blocks(nn.Module):
  """The drafter's own decoder layers, from layer `first` on."""

  head_config: HeadConfig
  place: Place = sharding.anywhere
  first: int = 0

  @nn.compact
  def __call__(self, x: Array, layers: tuple, view: View):
    config = self.head_config.layers
    angles = rope_angles(config, view.positions, None)
    new_layers = []
    for i in range(self.first, self.head_config.num_layers):
      layer = layers[i - self.first] if layers else None
      x, layer = Layer(config, self.place, name=f"layer_{i}")(
        x, layer, angles, view
      )
      new_layers.append(layer)
    return x, tuple(new_layers)


def attend_and_feed(
  config: TransformerConfig,
  place: Place,
  stream: Array,
  read: Array,
  layer: tuple[Array, Array] | None,
  view: View,
):
  """Runs a decoder layer whose attention reads something other than the stream.

  Its modules belong to the `nn.compact` method that calls it.

  Args:
    stream: [B, T, W] residual stream.
    read: [B, T, any] what attention reads.
    layer: its keys and values; None: no cache.
    view: positions and mask.
  """
  angles = rope_angles(config, view.positions, None)
  attention = Attention(config, place, name="attention")
  y, layer = attention(read, layer, angles, view)
  x = place(stream + y, "rows", None, None)  # sums over the devices of heads
  y = RMSNorm(config.norm_epsilon, name="mlp_norm")(x)
  y = MLP(config, place, name="mlp")(y)
  return place(x + y, "rows", None, None), layer


class Head(nn.Module):
  """A norm, then logits by a projection of its own, or the target's."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  normed: bool = False  # what it is given has passed the norm

  @nn.compact
  def __call__(self, target_weights: TargetWeights, x: Array) -> Array:
    if not self.normed:
      x = RMSNorm(self.head_config.norm_epsilon, name="norm")(x)
    if self.head_config.head == "own":
      shape = (self.num_tokens, x.shape[-1])
      return project(weight(self, shape, x.dtype), x, jnp.float32)
    if x.shape[-1] != self.target.width:
      x = Linear(self.target.width, name="up")(x)
    return shared_score(target_weights.head, self.target, x)


def shared_score(rows: Array, target: TransformerConfig, x: Array) -> Array:
  """[B, T, n] the target's logits of what stands for its hidden states.

  Args:
    rows: [n, M] of its vocabulary projection, as it is held.
  """
  if target.scale_logits:
    x = x * target.width**-0.5
  return softcap(project(rows, x, jnp.float32), target.logit_softcap)


def embedded(target_weights: TargetWeights, tokens: Array) -> Array:
  """[B, T, M] the target's embeddings, its weights left as they are."""
  return look_up(target_weights.embed, tokens)


class Embed(nn.Module):
  """Embeddings [B, T, W] of tokens: its own table's, or the target's."""

  head_config: HeadConfig
  target: TransformerConfig

  @nn.compact
  def __call__(self, target_weights: TargetWeights, tokens: Array) -> Array:
    if self.head_config.embed == "shared":
      return embedded(target_weights, tokens)
    shape = self.target.vocab_size, self.head_config.width
    return look_up(weight(self, shape, jnp.float32), tokens)


class HeadModule(nn.Module):
  """What the modules of most kinds share; each adds DraftHead's `step`."""

  head_config: HeadConfig
  target: TransformerConfig
  num_tokens: int
  place: Place = sharding.anywhere

  def encode(self, output: ModelOutput) -> Array:
    return output.hidden

  def logits(self, target_weights, hidden, depth) -> Array:
    return self.head(target_weights, hidden)


def instantiate(
  module: type[nn.Module],
  head_config: HeadConfig,
  target: TransformerConfig,
  ids: np.ndarray | None,
  place: sharding.Placement | None,
) -> tuple[nn.Module, np.ndarray | None, Callable[[Callable], Callable]]:
  """Returns the module of a head, the ids as an array, and a function that
  makes a pure function (weights, *args) of a method.

  Raises:
    ValueError: of `head_from_module`.
  """
  head_config.check(target)
  ids = None if ids is None else np.array(ids)
  head_config.check_ids(ids)
  num_tokens = head_config.vocabulary or target.vocab_size
  instance = module(head_config, target, num_tokens, place or sharding.anywhere)

  def call(method):
    def run(weights, *args):
      return instance.apply({"params": weights}, *args, method=method)

    return run

  return instance, ids, call


@cached
def head_from_module(
  module: type[HeadModule],
  head_config: HeadConfig,
  target: TransformerConfig,
  ids: np.ndarray | None = None,
  place: sharding.Placement | None = None,
) -> DraftHead:
  """Returns the head of a Flax module.

  Args:
    ids: [n] tokens that it can draft; None: all.
    place: on a mesh.

  Raises:
    ValueError: the head config does not fit the target, or the ids the head
      config.
  """
  instance, ids, call = instantiate(module, head_config, target, ids, place)
  num_tokens = instance.num_tokens
  features = head_config.streams

  def once(mdl):
    """Uses every weight once, so that all of them are initialised."""
    hidden = jnp.zeros((1, 1, target.width))
    target_weights = TargetWeights(
      jnp.zeros((1, target.width)), jnp.zeros((num_tokens, target.width))
    )
    output = ModelOutput(None, hidden, (hidden,) * len(features))
    given = mdl.encode(output)
    exit_hidden = hidden if head_config.exits else None
    tokens = jnp.zeros((1, 1), jnp.int32)
    zero = jnp.zeros((1,), jnp.int32)
    count = 2 if head_config.resets_each_round else 1
    view = attention.view(zero, None, 0, count)
    for depth in range(head_config.levels):
      given, _ = mdl.step(
        target_weights, tokens, given, (), view, depth, exit_hidden
      )
      mdl.logits(target_weights, given, depth)
      view = attention.view(zero, None, 0, 1)

  def init(key):
    return jax.jit(lambda key: instance.init(key, method=once))(key)["params"]

  return DraftHead(
    head_config,
    features,
    ids,
    target,
    init,
    cache_constructor(head_config, target, place),
    *(call(method) for method in (module.encode, module.step, module.logits)),
  )


def cache_constructor(
  head_config: HeadConfig,
  target: TransformerConfig,
  place: sharding.Placement | None,
) -> Callable[[int, int], KVCache]:
  """Returns (batch, slots) -> an empty cache of a head's own layers.

  KV is of the target's dtype, as are the streams that it is made from. A wider
  cache would be read twice: a TPU, whose products are of bfloat16, converts
  all of it before the loop over its blocks.
  """

  def init_cache(batch: int, slots: int) -> KVCache:
    config = head_config.layers
    cache = kv.init(
      batch,
      slots,
      head_config.num_layers,
      config.num_kv_heads,
      config.kv_dims,
      jnp.dtype(target.dtype),
    )
    if place is None:
      return cache
    layers = jax.tree.map(lambda x: place(x, *sharding.CACHE), cache.layers)
    return cache.replace(layers=layers)

  return init_cache


def target_weights_of(params: Params) -> TargetWeights:
  """What the drafter uses of the target's weights, out of both."""
  target, draft = params
  head = draft["head"] if "head" in draft else projection(target)
  return TargetWeights(target["embed"]["weight"], head)


def projected(
  head,
  weights: tuple[PyTree, TargetWeights],
  hidden: Array,
  place: Place,
  *depth,
) -> tuple[Array, Array]:
  """Returns hidden states [B, T, W], whole on every chip of a mesh, and their
  logits [B, T, n], in parts.

  Args:
    head: a DraftHead or a BlockHead.
    depth: of a DraftHead's logits.
  """
  hidden = place(hidden, "rows", None, None)
  return hidden, in_parts(head.logits(*weights, hidden, *depth), place)


def in_parts(logits: Array, place: Place) -> Array:
  """Splits logits [B, T, n], which are to be computed, over a mesh's chips: so
  each reads its part of the projection's rows, and not all of them."""
  return place(logits, "rows", None, "vocab")


def spread(
  draft_head: DraftHead, logits: Array, place: Place = sharding.anywhere
) -> Array:
  """Moves logits [B, T, n] of the tokens it can draft to [B, T, V]; -inf
  elsewhere."""
  if draft_head.ids is not None:
    logits = place(logits, "rows", None, None)
    column = np.full((draft_head.vocab_size,), len(draft_head.ids), np.int32)
    column[draft_head.ids] = np.arange(len(draft_head.ids))
    none = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
    logits = jnp.concatenate([logits, none], axis=-1)[..., column]
  return in_parts(logits, place)


def in_dtype(net: PyTree, dtype: str) -> PyTree:
  """Returns a head's weights in a dtype: to draft with, the target's.

  Products of a TPU are of bfloat16: of float32 weights it would make a copy
  every round, to read that at every level.
  """
  return cast(net, dtype)


def weights_of(
  draft_head: DraftHead, net: PyTree, target: PyTree
) -> dict[str, Any]:
  """Returns Params.draft: a head's net, and the rows that it may draft with.

  Args:
    target: the target's parameters, packed or not.
  """
  draft = {"net": net}
  if draft_head.head_config.head == "shared" and draft_head.ids is not None:
    draft["head"] = drafted_rows(draft_head.ids, target)
  return draft


def shardings(
  draft_head: DraftHead, weights: PyTree, place: sharding.Placement
) -> PyTree:
  """Returns the NamedSharding of every weight of a head.

  Heads and inner columns of decoder layers are split as a model's are, every
  other matrix along the first dimension that chips divide; vectors are whole.

  Args:
    weights: arrays or shapes.
  """
  if place.ways("mlp") == 1:  # integers with scales, too, which have no names
    return jax.tree.map(lambda _: place.sharding(()), weights)
  in_layers = layer_axes(draft_head.head_config.layers)

  def of_leaf(path, x) -> jax.sharding.NamedSharding:
    name = "/".join(part.key for part in path)
    for end, axes in in_layers.items():
      if name.endswith(f"/{end}"):
        return place.sharding(axes, name, x.shape)
    return place.sharding(place.by_size(x.shape), name)

  return jax.tree_util.tree_map_with_path(of_leaf, weights)


def projection(target: PyTree) -> Array:
  """Returns a target's vocabulary projection [V, M], as it is held."""
  return (target["head"] if "head" in target else target["embed"])["weight"]


def drafted_rows(ids: Array, target: PyTree) -> Array:
  """Returns the rows [n, M] of a target's projection of tokens [n]."""
  return look_up(projection(target), jnp.asarray(ids))


def quantize(draft: dict[str, Any], form: WeightFormat) -> dict[str, Any]:
  """Returns `weights_of` a drafter with its matrices as integers.

  That is lossless: it changes what is drafted, and with which probability.
  """
  bits, group = BITS[form.kind], form.group or GROUP
  small = {"net": layouts.quantize(draft["net"], group, bits)}
  if "head" in draft:
    small["head"] = quantization.quantize(draft["head"], group, bits)
  return small
