"""How a drafter that can run a model samples a chain or a tree, level by level.

A drafter gives a callback that runs draft nodes, and a shape calls it. What the
callback needs from one call to the next (a cache, hidden states) is a carry
that the shape threads through. Invariant (rules 6 and 7): the distribution that
is handed over for a node is the one its token was drawn from, given its earlier
siblings; no token that was drawn is re-ranked or dropped. What is re-ranked
(`dynamic`) was not drawn.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_tree, sampling
from specdec.types import Array, Context, Draft, DraftSpec, PyTree
from specdec.utils.constructors import cached

KINDS = ("iid", "without_replacement", "deterministic")

# run(carry, tokens [B, T], parents, first, need_logits)
#   -> (carry, logits [B, T, V], or [B, 1, V] if all T have the same; None where
#   they are not needed).
# The tokens are nodes first .. first + T - 1 of those run so far; parents,
# [first + T] or [B, first + T], are of all of them. Called once a level, by
# Python: a carry may hold what is no array.
Run = Callable[[PyTree, Array, Array, int, bool], tuple[PyTree, Array | None]]


class SampledTree(NamedTuple):
  """A tree of draft tokens, and which of the nodes run each of them is."""

  draft: Draft
  slot: Array  # [B, N] index into the nodes run; -1: the node was not run


class Plan(NamedTuple):
  """What a policy has decided, and carries from level to level."""

  going: Array  # [B] bool: rows that draft the next level
  memory: PyTree = None


class LengthPolicy(NamedTuple):
  """Decides how long each row's chain becomes; pure functions.

  begin(context, able [B] bool or None) -> Plan, before level 1. Rows that are
    not able have no draft to verify; None: all have.
  classify(probability [B]) -> [B]: the class, in 0 .. classes - 1, of a token
    that the draft expects to be accepted with this probability.
  go_on(plan, depth, certainty [B]) -> Plan, after the token at `depth`, which
    may be traced, was drawn; it is verified all the same.
  admit(plan, logits) -> Plan, before a token is drawn after these logits.
  classes: of certainty, whose outcomes are kept (Context.outcomes).
  """

  begin: Callable[[Context, Array | None], Plan]
  classify: Callable[[Array], Array]
  go_on: Callable[[Plan, Any, Array], Plan]
  admit: Callable[[Plan, Array], Plan] = lambda plan, logits: plan
  classes: int = 0


class DraftShape(NamedTuple):
  """The shape of a draft, for any drafter that can run a tree.

  sample_tree(context, logits, run, carry, run_leaves=False)
    -> (SampledTree, carry). `logits` [B, V] follow the pending token, which is
    node 0 of what is run. With run_leaves a static tree's leaves are run too.
  """

  spec: DraftSpec
  num_run: int  # nodes run at most, the pending token included
  in_place: bool  # node n is run in slot n
  sample_tree: Callable[..., tuple[SampledTree, PyTree]]
  loops: bool = False  # it is a chain, which `sample_chain` draws as well
  policy: LengthPolicy | None = None  # how long that becomes; None: all of it


def unclassified(probability: Array) -> Array:
  """Returns the class of every token where there is one only."""
  return jnp.zeros(probability.shape, jnp.int32)


def own_probability(logits: Array, token: Array) -> Array:
  """[B] probability of a token by the logits [B, V] it was drawn from, before
  any warp: after it a greedy row's tokens all have probability 1."""
  logits = logits.astype(jnp.float32)
  own = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
  return jnp.exp(own - jax.nn.logsumexp(logits, axis=-1))


def among(policy: LengthPolicy | None, able: Array) -> LengthPolicy:
  """Returns the policy, or one that drafts every level, of rows `able` [B]."""
  if policy is not None:
    begin = policy.begin
    return policy._replace(begin=lambda context, _=None: begin(context, able))
  return LengthPolicy(
    begin=lambda context, _=None: Plan(able),
    classify=unclassified,
    go_on=lambda plan, depth, certainty: plan,
  )


def resolve(k: int | None, shape: DraftShape | None) -> DraftShape:
  """Returns `shape`, or chain(k) where k is given instead.

  Raises:
    ValueError: both or neither are given, or k < 0.
  """
  if (k is None) == (shape is None):
    raise ValueError(
      f"k = {k} and shape {'absent' if shape is None else 'given'}: give one "
      "of them; k is short for shape=draft_shape.chain(k)"
    )
  return chain(k) if shape is None else shape


def pending_only(context: Context) -> Draft:
  """Returns the draft of the pending token alone."""
  count = jnp.ones_like(context.length)
  return Draft(context.pending, None, None, count)


def sample_chain(
  context: Context,
  k: int,
  extend: Callable[[PyTree, Array, Array], tuple[PyTree, Array]],
  carry: PyTree,
  *,
  logits: Array | None = None,
  policy: LengthPolicy | None = None,
  confidence: Callable[[PyTree], Array] | None = None,
) -> tuple[Draft, PyTree]:
  """Draws up to k >= 1 tokens in a row in a loop: `extend` is traced once.

  Args:
    extend: (carry, token [B, 1], its node) -> (carry, logits [B, V] after it).
    carry: what `extend` threads; arrays only.
    logits: [B, V] after the pending token; None: it is run first.
    policy: which rows draft each level; default all. Nodes past the one that
      ended a row are not in use.
    confidence: carry of `extend` -> [B], how probable it is that the token
      drawn after these logits is accepted; default `own_probability`.

  Returns:
    The draft of k + 1 nodes, the last one in use not run, and the carry.
  """
  batch = context.length.shape[0]
  pending = context.pending[:, 0]

  def draw(depth, plan, draft, logits, carry):
    if policy is not None:
      plan = policy.admit(plan, logits)
    log_probs = sampling.warp(logits, context.sampling)
    token = sampling.argmax(log_probs + context.noise(depth, depth))
    draft = draft._replace(
      tokens=draft.tokens.at[:, depth].set(token),
      log_probs=draft.log_probs.at[:, depth].set(log_probs),
      count=draft.count + plan.going,
    )
    if policy is not None:
      sure = confidence(carry) if confidence else own_probability(logits, token)
      certainty = policy.classify(sure)
      plan = policy.go_on(plan, depth, certainty)
    if draft.certainty is not None:
      classes = draft.certainty.at[:, depth].set(certainty)
      draft = draft._replace(certainty=classes)
    return plan, draft

  def turn(depth, state):
    plan, draft, carry = state
    carry, logits = extend(carry, draft.tokens[:, depth - 1, None], depth - 1)
    return *draw(depth, plan, draft, logits, carry), carry

  plan = Plan(jnp.ones((batch,), bool))
  plan = plan if policy is None else policy.begin(context, None)
  draft = Draft(  # node 0 was not drawn
    jnp.zeros((batch, k + 1), pending.dtype).at[:, 0].set(pending),
    None,
    jnp.zeros((batch, k + 1, context.vocab_size)),
    jnp.ones_like(context.length),
  )
  if policy is not None and policy.classes:
    draft = draft._replace(certainty=jnp.zeros((batch, k + 1), jnp.int32))
  first = 1
  if logits is not None:
    plan, draft = draw(1, plan, draft, logits, carry)
    first = 2
  state = plan, draft, carry
  if policy is None:  # no row can stop: the compiler knows how many turns
    _, draft, carry = jax.lax.fori_loop(first, k + 1, turn, state)
  else:
    _, (_, draft, carry) = jax.lax.while_loop(
      lambda loop: (loop[0] <= k) & jnp.any(loop[1][0].going),
      lambda loop: (loop[0] + 1, turn(*loop)),
      (jnp.int32(first), state),
    )
  return draft, carry


def idle(shape: DraftShape) -> Callable[[Context], Array] | None:
  """Returns `Drafter.idle` of a draft model whose drafts have this shape: what
  says that its policy lets no row draft."""
  policy = shape.policy
  if policy is None:
    return None
  return lambda context: ~jnp.any(policy.begin(context, None).going)


@cached
def static(parents, siblings: str = "without_replacement") -> DraftShape:
  """Returns the shape of a static tree.

  Args:
    parents: [N] in level order (draft_tree.from_paths, draft_tree.parallel).
    siblings: how the children of a node are drawn. 'iid': independently; where
      several spell one text they are joined (draft_tree.canonical).
      'without_replacement': the top of log_probs + Gumbel noise
      (arXiv:1903.06059), which under a coupled rule are the top-k of the
      target's noise. 'deterministic': the likeliest tokens.

  Raises:
    ValueError: the tree is not in level order, or the kind is unknown.
  """
  parents = np.array(parents, np.int32)
  levels = draft_tree.levels(parents)
  if siblings not in KINDS:
    raise ValueError(f"siblings = {siblings!r}; accepted: {', '.join(KINDS)}")
  single = draft_tree.max_siblings(parents) <= 1
  joined = siblings == "iid" and not single
  num_nodes = len(parents)
  spec = DraftSpec.of(
    parents,
    siblings="none" if single and siblings != "deterministic" else siblings,
  )
  if joined:  # the tree depends on what was drawn
    num_chains = int(np.sum(parents == 0))
    if not np.array_equal(
      parents, draft_tree.parallel(num_chains, spec.max_depth)
    ):
      num_chains = 0
    spec = spec._replace(parents=None, num_chains=num_chains)
  families: dict[int, list[int]] = {}
  for node, parent in enumerate(parents[1:].tolist(), 1):
    families.setdefault(parent, []).append(node)

  def sample_tree(context, logits, run, carry, run_leaves=False):
    tokens = [context.pending[:, 0]]
    all_log_probs = [jnp.zeros_like(sampling.warp(logits, context.sampling))]
    slot = np.full(num_nodes, -1, np.int32)
    slot[0] = 0
    after, first = logits[:, None], 0  # logits after nodes first, first + 1, ..
    for depth, level in enumerate(levels[1:], 1):
      nodes = range(level.start, level.stop)
      drawn = {}
      for parent in dict.fromkeys(parents[level].tolist()):
        facing = after[:, parent - first if after.shape[1] > 1 else 0]
        drawn |= _siblings(siblings, context, facing, depth, families[parent])
      for node in nodes:
        token, log_probs = drawn[node]
        tokens.append(token)
        all_log_probs.append(log_probs)
      inner = [node for node in nodes if node in families]
      stop = max(inner, default=level.start - 1) + 1
      part = level if run_leaves else slice(level.start, stop)
      if part.stop > part.start:
        slot[part] = np.arange(part.start, part.stop)
        carry, after = run(
          carry,
          jnp.stack(tokens[part], axis=1),
          parents[: part.stop],
          part.start,
          bool(inner),
        )
        first = part.start
    tokens = jnp.stack(tokens, axis=1)
    draft = Draft(
      tokens,
      draft_tree.canonical(tokens, parents) if joined else None,
      None if siblings == "deterministic" else jnp.stack(all_log_probs, axis=1),
      jnp.full_like(context.length, num_nodes),
    )
    return SampledTree(draft, jnp.broadcast_to(slot, tokens.shape)), carry

  return DraftShape(spec, num_nodes, True, sample_tree)


def step_widths(k: int) -> tuple[int, ...]:
  """Returns few node counts up to k + 1 at which rounds are compiled."""
  drafted = {0, k, *(2**i for i in range(k.bit_length()))}
  return tuple(1 + n for n in sorted(drafted))


def check_scratch(shape: DraftShape) -> None:
  """Refuses a shape that does not fit the scratch slots of the target's cache.

  Raises:
    ValueError: drafting would run more nodes than the tree has.
  """
  num_run, num_nodes = shape.num_run, shape.spec.max_nodes
  if num_run > num_nodes:
    raise ValueError(
      f"drafting runs {num_run} nodes and the tree has {num_nodes}; the "
      "target's cache has room for the tree: keep more, or try fewer"
    )


@cached
def chain(k: int) -> DraftShape:
  """Returns the shape of k >= 0 tokens in a row, each drawn from its own
  distribution."""
  if k < 0:
    raise ValueError(f"k = {k}; it must be >= 0")
  return static(draft_tree.chain(k + 1), "iid")._replace(loops=True)


def _siblings(kind, context, logits, depth, children) -> dict:
  """Draws the children of one node: node -> (token [B], log_probs [B, V])."""
  log_probs = sampling.warp(logits, context.sampling)
  if kind == "iid":
    return {
      node: (sampling.argmax(log_probs + context.noise(depth, node)), log_probs)
      for node in children
    }
  if len(children) > logits.shape[-1]:
    raise ValueError(
      f"{len(children)} children of one node, no two the same; the vocabulary "
      f"has {logits.shape[-1]} tokens"
    )
  if kind == "deterministic":
    best, _ = _top(logits, len(children))
    return {node: (best[:, i], log_probs) for i, node in enumerate(children)}
  noise = context.noise(depth, children[0])
  column = jax.lax.broadcasted_iota(jnp.int32, log_probs.shape, 1)
  taken = jnp.zeros(log_probs.shape, bool)
  drawn = {}
  for node in children:
    left = jnp.where(taken, -jnp.inf, log_probs)
    # Once the support is used up: uniform over the tokens not taken.
    used_up = jnp.all(jnp.isinf(left), axis=-1, keepdims=True)
    left = jnp.where(used_up & ~taken, 0.0, left)
    left = jax.nn.log_softmax(left)
    token = sampling.argmax(left + noise)
    drawn[node] = token, left
    taken |= column == token[:, None]
  return drawn


def _top(logits: Array, count: int) -> tuple[Array, Array]:
  """Returns the likeliest tokens [..., count] in order, and their log_probs;
  of more than there are the rest at -inf."""
  return sampling.top(jax.nn.log_softmax(logits.astype(jnp.float32)), count)


@cached
def dynamic(
  top: int, depth: int, size: int, siblings: str = "deterministic"
) -> DraftShape:
  """EAGLE-2's tree (arXiv:2406.16858): its shape follows the draft's certainty.

  Of every level the `top` likeliest prefixes are extended by their `top`
  likeliest tokens each; of all these draft tokens the `size` likeliest make the
  tree. Likeliest by the draft's distribution, no temperature. Its children are
  deterministic: re-ranking tokens that were drawn would change the distribution
  of the text.

  A prefix of d tokens that has a child in the tree has d - 1 ancestors there,
  and the likelier prefixes of its level: so of level d at most size - d are
  extended, by as many tokens each. With top = size no tree of that size is
  likelier (DDTree, arXiv:2604.12989). Where all prefixes of a level go on by
  the same distribution, as slots of one pass do, the i-th of them with its j-th
  token has i j - 1 likelier ones in its level and d ancestors: pairs that do
  not fit are not tried.

  Args:
    top: prefixes extended and tokens tried after each, >= 1.
    depth: levels, >= 1.
    size: draft tokens kept, in 1 .. top + (depth - 1) top^2.
    siblings: 'deterministic'; anything else is refused.

  Raises:
    ValueError: an argument out of range.
  """
  if siblings != "deterministic":
    raise ValueError(
      f"siblings = {siblings!r} cannot be re-ranked: what was drawn must be "
      "kept; a dynamic tree needs deterministic"
    )
  if top < 1 or depth < 1:
    raise ValueError(f"top = {top} and depth = {depth}; both must be >= 1")
  most = top + (depth - 1) * top * top
  if not 1 <= size <= most:
    raise ValueError(
      f"size = {size}; {depth} levels of the {top} likeliest have 1 to {most} "
      "draft tokens"
    )
  depth = min(depth, size)  # levels that so many draft tokens can fill
  spec = DraftSpec(size + 1, depth, (size + 1,), siblings="deterministic")
  # Of each level but the last: how many prefixes are extended, by how many
  # tokens.
  widths = [min(top, size - d) for d in range(1, depth)]

  def sample_tree(context, logits, run, carry, run_leaves=False):
    del run_leaves  # they stand elsewhere than they were run
    batch = logits.shape[0]
    pending = context.pending[:, 0]

    put = jax.vmap(lambda row, at, new: row.at[at].set(new), (0, 0, None))

    # Candidates, level by level: tokens, their scores, and of the prefixes that
    # they go on from the numbers as candidates, -1 for the root, and as nodes
    # that were run.
    tokens, score = _top(logits, min(top, size))  # [B, top]
    ends = jnp.full(tokens.shape, -1), jnp.zeros(tokens.shape, jnp.int32)
    levels, slots = [(tokens, score, ends[0])], []
    places = jnp.full((batch, 1), -1, jnp.int32)
    base, first = 0, 1
    for width in widths:
      # The likeliest of the level before are run: [B, width].
      prefix, chosen = jax.lax.top_k(score, width)
      run_at = jnp.full(score.shape, -1)
      slots.append(put(run_at, chosen, first + jnp.arange(width)))
      best, place = (
        jnp.take_along_axis(x, chosen, axis=1) for x in (tokens, ends[1])
      )
      places = jnp.concatenate([places, place], axis=1)
      carry, after = run(carry, best, places, first, True)
      tokens, log_probs = _top(after, width)  # [B, width or 1, width]
      tried = slice(None)  # of the pairs of a prefix and a token
      if tokens.shape[1] == 1:
        order = np.arange(1, width + 1)
        tried = np.flatnonzero(np.outer(order, order) <= size - len(levels))
      shape = batch, width, width
      tokens = jnp.broadcast_to(tokens, shape).reshape(batch, -1)[:, tried]
      score = (prefix[:, :, None] + log_probs).reshape(batch, -1)[:, tried]
      nodes = jnp.broadcast_to(first + jnp.arange(width), (batch, width))
      ends = tuple(
        jnp.repeat(x, width, axis=1)[:, tried] for x in (base + chosen, nodes)
      )
      base, first = base + run_at.shape[1], first + width
      levels.append((tokens, score, ends[0]))
    slots.append(jnp.full(score.shape, -1))
    tokens, score, parent = (jnp.concatenate(x, axis=1) for x in zip(*levels))
    slot = jnp.concatenate(slots, axis=1)

    # No child beats its parent, and of equals the first is taken: whoever is
    # kept has its parent kept, and stands after it.
    kept = jnp.sort(jax.lax.top_k(score, size)[1], axis=1)  # [B, size]
    node = put(jnp.zeros_like(slot), kept, 1 + jnp.arange(size))
    above = jnp.take_along_axis(parent, kept, axis=1)
    below_root = jnp.take_along_axis(node, jnp.maximum(above, 0), axis=1)

    def with_root(root, rest):
      return jnp.concatenate([root[:, None], rest], axis=1)

    zero = jnp.zeros((batch,), jnp.int32)
    draft = Draft(
      with_root(pending, jnp.take_along_axis(tokens, kept, axis=1)),
      with_root(zero - 1, jnp.where(above < 0, 0, below_root)),
      None,
      jnp.full_like(context.length, size + 1),
    )
    slot = with_root(zero, jnp.take_along_axis(slot, kept, axis=1))
    return SampledTree(draft, slot), carry

  return DraftShape(spec, 1 + sum(widths), False, sample_tree)
