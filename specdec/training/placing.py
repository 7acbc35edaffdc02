"""Places a target and its draft head on a mesh for training.

The target lies as it is served. Of the head, whatever kind it is, heads and
inner columns of decoder layers are split as a model's are (sharding.py), every
other matrix along the first dimension that its devices divide, and vectors lie
whole on every device. Losses are means over the whole batch wherever its rows
lie, so a mesh changes rounding and nothing else.
"""

import functools
import math
import sys

import jax
import numpy as np

from specdec import drafters, multihost, sharding
from specdec.compiled import memory_plan
from specdec.drafters.heads import draft_head
from specdec.drafters.heads.block_head import AnyHead
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import Growing
from specdec.models.config import TransformerConfig
from specdec.sharding import Placement, Places
from specdec.training.options import Options
from specdec.types import PyTree
from specdec.utils import terminal


def places(
  mesh: str | None,
  target: TransformerConfig,
  head_config: HeadConfig | None,
  options: Options,
  draft_ways: int | None = None,
  devices=None,
) -> Places:
  """Returns where target and head are placed; None each without a mesh.

  Args:
    mesh: 'data:N,model:M' (sharding.parse).
    head_config: None: there is no head.
    draft_ways: how many devices of the M share the head's weights, default M;
      1: each has all of them.
    devices: default all of JAX's.

  Raises:
    ValueError: the mesh has more devices than there are, or they do not divide
      the sequences that are computed at once, the target or the head.
  """
  if mesh is None:
    return Places(None)
  counts = head_config and head_config.counts
  where = sharding.places(mesh, target.counts, counts, draft_ways, devices)
  check_rows(mesh, where.target, options)
  return where


def check_rows(mesh: str, place: Placement, options: Options) -> None:
  """Raises ValueError where the mesh does not divide a microbatch."""
  piece = options.batch // options.accumulate
  if piece % place.ways("rows"):
    raise ValueError(
      f"mesh = {mesh} does not divide the {piece} sequences that are computed "
      "at once (options.batch / options.accumulate)"
    )


def heads(
  head_config: HeadConfig,
  target: TransformerConfig,
  ids: np.ndarray | None,
  place: Placement | None,
) -> tuple[AnyHead, AnyHead]:
  """Returns a head as it drafts, and as it is trained.

  Args:
    ids: [n] tokens that it can draft; None: all.
    place: of the head in training; it drafts with all of its weights on every
      device.
  """
  serving = place and place.whole()
  training = Growing(place) if place else Growing()
  make = drafters.LEARNED[head_config.kind]
  return tuple(make(head_config, target, ids, x) for x in (serving, training))


def gathered(net: PyTree, place: Placement | None) -> PyTree:
  """Returns weights of which every device has all."""
  return net if place is None else _gather(place.sharding(()))(net)


@functools.lru_cache
def _gather(where: jax.sharding.NamedSharding):
  """Returns a function that puts a tree there; it is compiled once."""
  return jax.jit(lambda x: x, out_shardings=where)


def put(head: AnyHead, net: PyTree, place: Placement | None) -> PyTree:
  """Returns a head's weights, which every process has, on their devices."""
  if place is None:
    return net
  return jax.tree.map(
    multihost.put, net, draft_head.shardings(head, net, place)
  )


def plan(
  head_config: HeadConfig | None,
  target: TransformerConfig,
  where: Places,
  trains_target: bool = False,
) -> memory_plan.Plan:
  """Estimates what each device must hold.

  Args:
    head_config: None: there is no head.
    target: its config; it is held in its dtype.
  """
  head_size, size = 0, memory_plan.weight_bytes(target, where.target)
  if head_config:
    few = head_config.vocabulary
    ids = np.arange(few) if few else None
    _, head = heads(head_config, target, ids, where.draft)
    net = jax.eval_shape(head.init, jax.random.key(0))
    shapes = [x.shape for x in jax.tree.leaves(net)]
    if where.draft:
      lie = jax.tree.leaves(draft_head.shardings(head, net, where.draft))
      shapes = [to.shard_shape(shape) for to, shape in zip(lie, shapes)]
    head_size = 4 * sum(map(math.prod, shapes))  # float32
  if trains_target:
    return memory_plan.training(head_size + size)
  return memory_plan.training(head_size, size)


def check_memory(plan: memory_plan.Plan, place: Placement | None) -> None:
  """Reports a plan.

  Raises:
    MemoryError: it would not fit.
  """
  terminal.report(
    f"train: each device needs about {plan}, and activations", sys.stderr
  )
  memory_plan.check(plan, place)
