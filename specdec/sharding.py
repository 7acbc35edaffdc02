"""Which chip holds what: names of axes, rules, meshes, placements.

Every dimension of a parameter, a cache and the decode state has a logical name
or none; `Rules` say over which axes of a mesh a name is split, and whatever has
no rule lies whole on every chip. A mesh has the axis `data`, over which rows of
a batch are split, and `model`, over which heads, inner MLP columns and the
vocabulary are (Megatron, arXiv:1909.08053). Invariant: where `model` has more
chips than something divides by, it is cut into `model`, `model_2`, ..., so that
every number of shards that is needed is a product of the first few of them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec.types import DecodeState, KVCache, PyTree, RecurrentState

Names = tuple[str | None, ...]  # of a leaf's dimensions
CACHE: Names = ("rows", "key", None, None)
_STATE_KEYS: Names = ("rows", "state_key", None, None)
STATE: Names = ("rows", "state", None, None)
RECURRENT = RecurrentState(  # the same of every leaf
  state=STATE,
  inputs=(_STATE_KEYS, _STATE_KEYS, STATE),
  keys=_STATE_KEYS,
  values=STATE,
  decays=STATE[:3],
  folded=STATE[:1],
)


@dataclasses.dataclass(frozen=True)
class Rules:
  """Logical axis -> the mesh axes that it is split over, () for none.

  Attributes:
    rows: of a batch.
    vocab: embedding, vocabulary projection, logits, distributions.
    query: query heads, and the columns of what projects to and from them.
    key: KV heads; fewer axes than `query` where there are fewer heads than
      chips: then several chips hold one head, and share its queries.
    mlp: inner columns of the MLP.
    experts: of a mixture, where devices divide them;
    expert_mlp: else inner columns of each.
    state: heads of recurrent layers, each with a state.
    state_key: their key heads, as `key`.
  """

  rows: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()
  query: tuple[str, ...] = ()
  key: tuple[str, ...] = ()
  mlp: tuple[str, ...] = ()
  experts: tuple[str, ...] = ()
  expert_mlp: tuple[str, ...] = ()
  state: tuple[str, ...] = ()
  state_key: tuple[str, ...] = ()

  def __post_init__(self):
    if self.query[: len(self.key)] != self.key:
      raise ValueError(
        f"KV heads over {self.key} and query heads over {self.query}: a query "
        "would be far from its keys"
      )

  @property
  def group(self) -> tuple[str, ...]:
    """Of the queries that share a KV head."""
    return self.query[len(self.key) :]

  @property
  def shared(self) -> tuple[str, ...]:
    """Of the inner columns of the shared expert."""
    return self.mlp

  @property
  def dense(self) -> tuple[str, ...]:
    """Of the inner columns of a mixture's dense layers."""
    return self.mlp

  @property
  def query_key(self) -> tuple[str, ...]:
    """Of latent attention's maps to the keys of query heads."""
    return self.query

  @property
  def value(self) -> tuple[str, ...]:
    """Of its maps to their values, and the columns of what projects them."""
    return self.query

  @property
  def state_head(self) -> tuple[str, ...]:
    """Of recurrent heads that have one value each."""
    return self.state

  def spec(self, names: Names, leaf: str = "a leaf") -> PartitionSpec:
    """Of a leaf whose dimensions are called so.

    Raises:
      ValueError: two dimensions would be split over one mesh axis.
    """
    axes = [getattr(self, name, ()) if name else () for name in names]
    used = list(itertools.chain(*axes))
    for axis in used:
      if used.count(axis) > 1:
        raise ValueError(f"{leaf} {names}: two dimensions over axis {axis!r}")
    return PartitionSpec(*(axis or None for axis in axes))


@dataclasses.dataclass(frozen=True)
class Placement:
  """A model's rules on a mesh. Hashable: programs are compiled for it."""

  mesh: Mesh
  rules: Rules

  def sharding(
    self,
    names: Names,
    leaf: str = "a leaf",
    shape: tuple[int, ...] | None = None,
  ) -> NamedSharding:
    """Of a leaf whose dimensions are called so.

    Raises:
      ValueError: two dimensions fall on one axis, or one does not divide.
    """
    for name, size in zip(names, shape or ()):
      if name and size % self.ways(name):
        raise ValueError(
          f"{leaf}: {size} along {name!r} do not divide by {self.ways(name)}"
        )
    return NamedSharding(self.mesh, self.rules.spec(names, leaf))

  def __call__(self, x: jax.Array, *names: str | None) -> jax.Array:
    """x, constrained to lie there; inside jit.

    Rows that do not divide, as of a single pass that is timed, are not split.
    """
    names = self._dividing(names, x.shape[0])
    return jax.lax.with_sharding_constraint(x, self.sharding(names))

  def whole(self) -> "Placement":
    """Returns that of which every device has all, but for the rows."""
    return Placement(self.mesh, Rules(rows=self.rules.rows))

  def on_each(
    self,
    f: Callable[..., PyTree],
    arguments: Sequence[PyTree],
    result: PyTree,
    sums: Names = (),
  ) -> Callable[..., PyTree]:
    """f, run by every device on its own parts of the arguments.

    Args:
      arguments, result: names of the axes of each leaf of the arguments, the
        first of which has rows, and of the result's; the leaves of a pytree may
        share them.
      sums: names over whose devices results are added up.
    """
    over = tuple(axis for name in sums for axis in getattr(self.rules, name))

    def on_part(*args: PyTree) -> PyTree:
      y = f(*args)
      return jax.lax.psum(y, over) if over else y

    def run(*args: PyTree) -> PyTree:
      def spec(names):
        rows = jax.tree.leaves(args[0])[0].shape[0]
        return self.rules.spec(self._dividing(names, rows))

      return jax.shard_map(
        on_part,
        mesh=self.mesh,
        in_specs=tree_map(spec, tuple(arguments)),
        out_specs=tree_map(spec, result),
        check_vma=False,
      )(*args)

    return run

  def _dividing(self, names: Names, rows: int) -> Names:
    """The names, but rows that do not divide are not split."""
    if names[:1] == ("rows",) and rows % self.ways("rows"):
      return (None, *names[1:])
    return names

  def by_size(self, shape: tuple[int, ...]) -> Names:
    """Returns the axes of a leaf whose dimensions have no names: a matrix is
    split along the first one that divides, a vector is not."""
    ways = self.ways("mlp")
    divisible = [i for i, size in enumerate(shape) if size % ways == 0]
    axes = [None] * len(shape)
    if len(shape) > 1 and divisible:
      axes[divisible[0]] = "mlp"
    return tuple(axes)

  def divisible(self, rows: int) -> int:
    """Returns the least number of rows from `rows` on that divides."""
    ways = self.ways("rows")
    return -(-rows // ways) * ways

  def ways(self, name: str) -> int:
    """Over how many chips an axis of that name is split."""
    axes = getattr(self.rules, name, ())
    return math.prod(self.mesh.shape[axis] for axis in axes)


def tree_map(f: Callable[..., object], names: PyTree, *rest: PyTree) -> PyTree:
  """jax.tree.map over the Names of leaves, and trees of the same form."""

  def is_names(x) -> bool:
    return isinstance(x, tuple) and all(
      name is None or isinstance(name, str) for name in x
    )

  return jax.tree.map(f, names, *rest, is_leaf=is_names)


@dataclasses.dataclass(frozen=True)
class Anywhere:
  """What a model has in a placement's stead: one device, nothing to say."""

  def __call__(self, x: jax.Array, *names: str | None) -> jax.Array:
    del names
    return x

  def on_each(self, f, arguments, result, sums=()):
    del arguments, result, sums
    return f


anywhere = Anywhere()


def parse(text: str) -> dict[str, int]:
  """'data:2,model:4' as {'data': 2, 'model': 4}; what is left out is 1.

  Raises:
    ValueError: another axis, one twice, or a size below 1.
  """
  sizes = {}
  for part in filter(None, text.split(",")):
    name, _, size = part.partition(":")
    if name in sizes:
      raise ValueError(f"mesh {text!r} gives {name} twice")
    if name not in ("data", "model") or not size.isdecimal() or int(size) < 1:
      raise ValueError(
        f"mesh {text!r}: {part!r} is no axis; give data:N,model:M, each >= 1"
      )
    sizes[name] = int(size)
  return {"data": 1, "model": 1} | sizes


def make_mesh(
  data: int, model: int, parts: Sequence[int] = (), devices=None
) -> Mesh:
  """A mesh of data x model chips.

  Args:
    parts: further numbers of shards that models are to be split into.
    devices: default all of JAX's.

  Raises:
    ValueError: there are fewer devices, or the parts do not divide each other.
  """
  devices = jax.devices() if devices is None else devices
  if data * model > len(devices):
    raise ValueError(
      f"a mesh of data:{data},model:{model} needs {data * model} devices; "
      f"there are {len(devices)}"
    )
  chain = sorted({1, model, *parts})
  check_nesting(*chain)
  sizes = [large // small for small, large in itertools.pairwise(chain)] or [1]
  names = ["model", *(f"model_{i}" for i in range(2, len(sizes) + 1))]
  axes = ("data", *names)
  # Near neighbours along every axis; a torus' own axes may be cut for it.
  try:
    grid = mesh_utils.create_device_mesh(
      (data, *sizes), devices[: data * model], allow_split_physical_axes=True
    )
  except AssertionError as error:  # of the chips of a torus
    raise ValueError(
      f"a mesh of data:{data},model:{model} is no part of these "
      f"{len(devices)} chips' torus: {error}; take all of them"
    ) from error
  return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))


def check_nesting(*parts: int) -> None:
  """Raises ValueError where one number of shards does not divide the next."""
  for small, large in itertools.pairwise(sorted(parts)):
    if large % small:
      raise ValueError(
        f"{small} and {large} shards do not nest: neither divides the other"
      )


# What all chips of a group share alike, and how messages call it.
_DIVIDED = {
  "vocab": "tokens of the vocabulary",
  "query": "query heads",
  "mlp": "inner columns of the MLP",
  "shared": "inner columns of the shared expert",
  "dense": "inner columns of dense layers",
  "state": "recurrent heads",
}


def shards(model: int, kv_heads: int) -> int:
  """Over how many of `model` chips KV heads are split."""
  return math.gcd(model, kv_heads)


def check_divides(
  counts: Mapping[str, int], ways: int, who: str = "the model"
) -> None:
  """Raises ValueError where so many chips do not divide what they are to share;
  counts as of `place`."""
  # Experts are divided, if they can be, else each of them; or there are none.
  if counts.get("experts") and not counts["experts"] % ways:
    counts = {**counts, "mlp": 0}
  for name, words in _DIVIDED.items():
    if (count := counts.get(name, 0)) % ways:
      fewer = math.gcd(ways, *(counts.get(x, 0) for x in _DIVIDED))
      raise ValueError(
        f"{ways} chips do not divide the {count} {words} of {who}; "
        f"{fewer} would"
      )
  for name, words in (("key", "KV"), ("state_key", "recurrent key")):
    if (count := counts.get(name, 0)) and count % ways and ways % count:
      raise ValueError(
        f"{ways} chips and {count} {words} heads of {who}: neither divides "
        "the other"
      )


def place(
  mesh: Mesh,
  counts: Mapping[str, int],
  ways: int | None = None,
  who: str = "the model",
) -> Placement:
  """Where a model goes: split `ways` ways, and over rows.

  Args:
    counts: of 'vocab', 'query' and 'key' heads, and 'mlp' columns; 'shared',
      'dense', 'experts', 'state' and 'state_key' where there are any.
    ways: chips that share its weights, default all of `model`; 1: every chip
      has all of them.

  Raises:
    ValueError: the chips do not divide what they are to share.
  """
  model = [axis for axis in mesh.axis_names if axis != "data"]
  sizes = [*itertools.accumulate((mesh.shape[a] for a in model), int.__mul__)]
  ways = sizes[-1] if ways is None else ways

  def first(number: int) -> tuple[str, ...]:
    if number == 1:
      return ()
    if number not in sizes:
      raise ValueError(
        f"{who} over {number} chips: this mesh has groups of {sizes}"
      )
    return tuple(model[: sizes.index(number) + 1])

  check_divides(counts, ways, who)
  whole = not counts.get("experts", 0) % ways
  axes = first(ways)
  rules = Rules(
    rows=("data",),
    vocab=axes,
    query=axes,
    key=first(shards(ways, counts["key"])),
    mlp=axes,
    experts=axes if whole else (),
    expert_mlp=() if whole else axes,
    state=axes,
    state_key=first(shards(ways, counts.get("state_key", 0))),
  )
  return Placement(mesh, rules)


class Places(NamedTuple):
  """Where the two models lie; `draft` None where the drafter has no cache."""

  target: Placement
  draft: Placement | None = None


def places(
  mesh: str,
  target: Mapping[str, int],
  draft: Mapping[str, int] | None = None,
  draft_ways: int | None = None,
  devices=None,
) -> Places:
  """Returns where two models lie on one mesh.

  Args:
    mesh: 'data:N,model:M' (`parse`).
    target, draft: what is to be split (TransformerConfig.counts); draft None:
      the drafter has no model.
    draft_ways: chips of the M that share the draft's weights, default M; 1:
      each has all of them.
    devices: default all of JAX's.

  Raises:
    ValueError: there are fewer devices, they do not divide the models, or the
      mesh leaves out some of the devices that several processes have.
  """
  size = parse(mesh)
  ways = size["model"]
  together = devices is None and jax.distributed.is_initialized()
  if together and math.prod(size.values()) != jax.device_count():
    raise ValueError(
      f"mesh = {mesh} and the processes together have {jax.device_count()} "
      "devices; all of them must be in it"
    )
  of_draft = ways if draft_ways is None else draft_ways
  if not 1 <= of_draft <= ways:
    raise ValueError(
      f"draft_ways = {draft_ways}; it must be in 1..{ways}, the mesh's model "
      "axis"
    )
  models = [("the target", target, ways)]
  if draft is not None:
    models.append(("the draft", draft, of_draft))
  parts = [w for _, _, w in models]
  parts += [
    shards(w, counts.get(name, 0))
    for _, counts, w in models
    for name in ("key", "state_key")
  ]
  device_mesh = make_mesh(**size, parts=parts, devices=devices)
  return Places(
    *(place(device_mesh, counts, w, who) for who, counts, w in models)
  )


def of_state(
  state: DecodeState, target: Placement, draft: Placement | None = None
) -> DecodeState:
  """The shardings of a decode state, by its shapes.

  What a drafter carries has its rows first; caches in it lie as the draft's.

  Raises:
    ValueError: the rows do not divide.
  """
  batch, ways = state.length.shape[0], target.ways("rows")
  if batch % ways:
    raise ValueError(f"a batch of {batch} rows over data:{ways}; take another")
  rows, whole = target.sharding(("rows",)), target.sharding(())

  def is_cache(x) -> bool:
    return isinstance(x, KVCache)

  def cache(place: Placement, who: str, buffers: KVCache) -> KVCache:
    def buffer(path, x):
      return place.sharding(
        CACHE, f"{who}{jax.tree_util.keystr(path)}", x.shape
      )

    def part(path, x):
      if isinstance(x, RecurrentState):
        where = jax.tree_util.keystr(path)
        return tree_map(
          lambda names, x: place.sharding(names, f"{who}{where}", x.shape),
          RECURRENT,
          x,
        )
      return buffer(path, x)

    layers = jax.tree_util.tree_map_with_path(
      part, buffers.layers, is_leaf=lambda x: isinstance(x, RecurrentState)
    )
    cross = buffers.cross
    if cross is not None:
      heads = jax.tree_util.tree_map_with_path(buffer, cross.layers)
      cross = cross.replace(layers=heads, length=rows)
    return KVCache(layers, rows, cross)

  def of_draft(x) -> PyTree:
    return cache(draft or target, "draft_state", x) if is_cache(x) else rows

  common = jax.tree.map(
    lambda _: rows, state.replace(target_cache=None, draft_state=None)
  )
  return common.replace(
    target_cache=cache(target, "target_cache", state.target_cache),
    draft_state=jax.tree.map(of_draft, state.draft_state, is_leaf=is_cache),
    stats=common.stats.replace(widths=whole),
  )
