"""Every pytree and callable signature of the project: read this file first.

Letters in shape comments: B rows of a batch, N nodes of a draft, D its depth,
V vocabulary, L token buffer, S cache slots, M model width, T tokens of a call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = jax.Array
PyTree = Any
UNBOUNDED = 2**30  # slots, of a cache without attention


class Params(NamedTuple):
  """Weights of the two models; `draft` is None where the drafter has none."""

  target: PyTree
  draft: PyTree = None


class Source(NamedTuple):
  """What an encoder reads: one ragged text a row."""

  tokens: Array  # [B, P] token ids, each row padded at its end with anything
  length: Array  # [B], each in 1..P


@struct.dataclass
class CrossKV:
  """Keys and values of a source, computed once and read by every pass."""

  layers: tuple[tuple[Array, Array], ...]  # (k, v) a layer: [B, heads, P, dim]
  length: Array  # [B] positions of the source


@struct.dataclass
class RecurrentState:
  """What a recurrent layer keeps: a state, and the W positions after it.

  Slot j of the W holds position `folded` + j, or scratch, as slots of a KV
  cache do; a position enters the state long after it was committed.
  """

  state: (
    Array  # [B, heads, value dim, key dim] float32 after `folded` positions
  )
  inputs: tuple[Array, ...]  # of the convolution, each [B, heads, P + W, dim];
  #                            the last of the first P lie before `folded`
  keys: Array  # [B, key heads, W, key dim]
  values: Array  # [B, heads, W, value dim]: state += value key^T
  decays: Array  # [B, heads, W] logarithm of what multiplies the state
  folded: Array  # [B] positions that the state has seen


@struct.dataclass
class Int8Slots:
  """Keys or values of a cache in eight bits, a scale for each that is written.

  So what a slot holds depends on no other slot, and a text is the same whatever
  was drafted on the way.
  """

  values: Array  # [B, heads, S, dim] int8
  scale: Array  # [B, heads, S, 1] float32, times which they stand


@struct.dataclass
class KVCache:
  """Keys and values; slots at or past `length` are scratch, never undone."""

  # (k, v) a layer, [B, heads, S, dim] each; or what a recurrent layer keeps
  layers: tuple[tuple[Array | Int8Slots, ...] | RecurrentState, ...]
  length: Array  # [B] committed positions
  cross: CrossKV | None = None  # of the source; None: a decoder alone

  @property
  def num_slots(self) -> int:
    """S, positions a row can hold, scratch included."""
    for layer in self.layers:
      if not isinstance(layer, RecurrentState):
        return jax.tree.leaves(layer[0])[0].shape[2]
    return UNBOUNDED


class ModelOutput(NamedTuple):
  """What one forward pass says about each of its T tokens."""

  logits: Array | None  # [B, T, V] float32; None with head=False
  hidden: Array  # [B, T, M] after the final norm
  features: tuple[Array, ...] = ()  # each [B, T, M]: the residual stream
  #                                   entering a layer that was asked for


class Skip(NamedTuple):
  """Sublayers that a pass leaves out: indices of layers."""

  attention: tuple[int, ...] = ()
  mlp: tuple[int, ...] = ()


class Sparse(NamedTuple):
  """Positions that the passes of a draft attend to, in place of all."""

  window: int  # the last ones, a node's own included
  sinks: int = 4  # and so many from the beginning


class Model(NamedTuple):
  """A language model with an explicit cache: pure functions and two sizes.

  apply(params, tokens, cache, *, parents=None, first=0, start=0, stop=None,
        hidden=None, head=True, features=(), skip=None,
        sparse=None)
    -> (ModelOutput, KVCache)
    Runs layers start..stop-1 on tokens [B, T], which stand after the committed
    positions of each row: node n at position cache.length + depth(n), its KV
    in slot cache.length + n. `parents` ([T] or [B, T]; None is a chain) says
    who sees whom. With first > 0 the tokens are nodes first .. first + T - 1 of
    a draft whose earlier nodes were run before and lie in their slots; parents
    then speaks about all of them. It writes KV and never moves `length`. With
    start > 0, `hidden` [B, T, M] is the residual stream entering that layer.
    `features` are indices of layers (`stop` included) whose entering stream is
    wanted. What `skip` names does not run at all: no weight of it is read, a
    skipped attention writes no KV, and the stream passes by. With `sparse` no
    attention reads other positions. Only drafters of this model ask for these
    two; a model may lack them.
  init_cache(batch, slots) -> KVCache, all empty.
  encode(params, source) -> CrossKV of a Source, which the cache holds as
    `cross` before the first call of apply; None: a decoder alone.
  max_tokens: of a model with recurrent layers, most tokens of a call that can
    be committed, the earlier nodes of their draft included, and most positions
    by which a cache's length may move back; None: any. A longer call, of a
    chain, leaves the cache as it was.
  """

  apply: Callable[..., tuple[ModelOutput, KVCache]]
  init_cache: Callable[[int, int], KVCache]
  vocab_size: int
  num_layers: int
  encode: Callable[[PyTree, Source], CrossKV] | None = None
  max_tokens: int | None = None


@struct.dataclass
class Sampling:
  """How logits become a distribution, row by row; None: no such filter."""

  temperature: Array  # [B] >= 0; 0 is greedy
  top_k: Array | None = None  # [B] int32 >= 1
  top_p: Array | None = None  # [B] in (0, 1]


ANY_CHAIN = 2**30  # DraftSpec.max_external_drafts of a chain of any length
SIBLINGS = ("none", "iid", "without_replacement", "deterministic")


class DraftSpec(NamedTuple):
  """Static facts of a drafter; hashable.

  Attributes:
    max_nodes: N, the pending token included.
    max_depth: D, tokens that one round can accept.
    widths: ascending node counts that decode compiles; the last is N.
    parents: the tree of every draft, N parents in level order, the root's -1;
      None: a draft brings its own (Draft.parents).
    siblings: how the children of a node are drawn, one of SIBLINGS. none:
      there is one; iid; without_replacement; deterministic: they are not drawn
      at all, be there one or several (Draft.log_probs is None).
    features: None: it reads nothing of the target; else the target's hidden
      states, and the residual streams entering these layers.
    max_external_drafts: it may be a fallback: propose need not be called in
      every round, and update takes chains of so many draft tokens that another
      drafter drafted.
    classes: of how certain a chain's tokens are (Draft.certainty); their
      outcomes are kept for propose (Context.outcomes). 0: none are.
    num_chains: how many i.i.d. chains, which share but the root, every draft
      is; 0: it is no such tree.
    name: for errors and tables.
  """

  max_nodes: int
  max_depth: int
  widths: tuple[int, ...]
  parents: tuple[int, ...] | None = None
  siblings: str = "none"
  features: tuple[int, ...] | None = None
  max_external_drafts: int = 0
  classes: int = 0
  num_chains: int = 0
  name: str = "the drafter"

  @classmethod
  def of(cls, parents, widths=None, **options) -> "DraftSpec":
    """Returns the spec of a static tree, parents [N] in level order."""
    parents = tuple(int(parent) for parent in parents)
    depth = [0]
    for parent in parents[1:]:
      depth.append(depth[parent] + 1)
    size = len(parents)
    return cls(size, max(depth), widths or (size,), parents, **options)

  @property
  def chain(self) -> bool:
    """Whether every draft is a chain."""
    return self.parents == tuple(range(-1, self.max_nodes - 1))

  def with_tree(self, draft: "Draft") -> "Draft":
    """Returns the draft, its parents a NumPy array where they are static."""
    if self.parents is None:
      return draft
    parents = self.parents[: draft.tokens.shape[1]]
    return draft._replace(parents=np.array(parents, np.int32))


class Resume(NamedTuple):
  """What an early-exit draft hands over, so that verification skips layers."""

  hidden: Array | None  # [B, N, M] the residual stream entering layer
  #                       len(layers); None: their scratch was only borrowed,
  #                       and verification runs every layer
  layers: tuple[tuple[Array, Array], ...]  # the first cache layers, written


class Draft(NamedTuple):
  """A tree of N draft tokens in level order; node 0 is the pending token."""

  tokens: Array  # [B, N]
  parents: Array | None  # [B, N], or [N] where rows share a tree; the root's
  #                        is -1; None: they stand in the drafter's spec
  log_probs: Array | None  # [B, N, V] the distribution token n was drawn from,
  #                          given its earlier siblings; None: deterministic
  count: Array  # [B] nodes in use, the root included
  resume: Resume | None = None
  certainty: Array | None = None  # [B, N] class of each node, of spec.classes


class RoundOutput(NamedTuple):
  """What a round would write untruncated: entry i follows path[i]."""

  tokens: Array  # [B, D+1] accepted tokens, then the next one
  origin: Array  # [B, D+1] int8
  log_probs: Array  # [B, D+1]
  draft_log_probs: Array  # [B, D+1]
  num_accepted: Array  # [B] before truncation
  sound: Array  # [B, D+1] bool: the target's distribution there is finite
  draft_sound: Array  # [B] bool: every distribution of the draft is finite


class AcceptResult(NamedTuple):
  """What became of a draft: truncated at EOS, the limit, and for done rows."""

  path: Array  # [B, D+1] accepted nodes in order, path[0] == 0
  num_accepted: Array  # [B] in 0..D
  next_token: Array  # [B] the token after the path: the new pending token
  num_committed: Array  # [B] num_accepted + 1, or 0 for a row that was done
  done: Array  # [B] bool: after the round
  fault: Array  # [B] int8: NO_FAULT, or why the row was stopped


NEVER = 2**30  # rounds, of int32


@struct.dataclass
class Outcomes:
  """What became of a row's draft tokens lately; older rounds count for less.

  Pairs are (accepted, evaluated): evaluated if all before it were accepted.
  """

  by_depth: Array  # [B, D, 2]
  by_class: Array  # [B, spec.classes, 2]
  idle: Array  # [B] rounds since the row last drafted,
  rest: Array  # [B] and since any row of the batch did; NEVER at the beginning


class Context(NamedTuple):
  """What a drafter may see of the decode state. Read only."""

  tokens: Array  # [B, L]
  length: Array  # [B]; tokens[b, length[b] - 1] is pending
  sampling: Sampling
  target_cache: KVCache
  noise: Callable[[Any, Any], Array]  # (depth, node) -> Gumbel [B, V] for
  #   drawing node `node` at depth `depth` >= 1. Children drawn together (top-k)
  #   share the noise of the first of them.
  source: Source | None = None  # of an encoder-decoder
  done: Array | None = None  # [B] bool
  outcomes: Outcomes | None = None  # of earlier rounds; None: spec.classes is 0

  @property
  def pending(self) -> Array:
    """[B, 1] the last committed token, which has no KV yet."""
    last = self.length[:, None] - 1
    return jnp.take_along_axis(self.tokens, last, axis=1)

  @property
  def vocab_size(self) -> int:
    """V, of the target."""
    return jax.eval_shape(lambda: self.noise(1, 1)).shape[-1]


class Drafter(NamedTuple):
  """Static facts and three pure functions, as an optax transformation is two.

  init(params, context, prefill_output) -> draft_state. prefill_output is a
    ModelOutput of the prompt without its last token (logits None), or None
    where spec.features is None.
  propose(params, draft_state, context) -> (Draft, draft_state)
  update(params, draft_state, context, draft, accept_result, target_output)
    -> draft_state. The context is the one before the commit; draft and
    target_output hold the nodes that were verified, which may be fewer than N.
  cost: what it holds and reads, for the cost model and the memory plan; None:
    unknown.
  idle(context) -> scalar bool, whether no row is to draft: the round is then
    one of autoregressive decoding, and `propose` is not called. None: never.
  """

  spec: DraftSpec
  init: Callable[[Params, Context, ModelOutput | None], PyTree]
  propose: Callable[[Params, PyTree, Context], tuple[Draft, PyTree]]
  update: Callable[..., PyTree]
  cost: "DrafterCost | None" = None
  idle: Callable[[Context], Array] | None = None

  @property
  def name(self) -> str:
    """For errors and tables."""
    return self.spec.name


class Window(NamedTuple):
  """The positions that a token attends to in a layer, its own included."""

  size: int
  chunk: int | None = None  # only those of its chunk, of so many positions

  def cached(self, context: int) -> int:
    """Returns how many cached positions the token after them sees."""
    seen = context % self.chunk if self.chunk else context
    return min(seen, self.size - 1)


class StepCost(NamedTuple):
  """What one pass of a drafter reads and computes, on one device.

  Every chip holds all of the drafter's weights, or its part of a draft that is
  shared out, and its part of the target's.
  A pass may run more tokens than it projects to logits: a block's slots, of
  which as many are projected as it drafts.
  """

  bytes: float = 0.0  # the drafter's weights that the pass reads
  flops: float = 0.0  # per row and token, without attention and projection
  # The drafter's rows for the tokens that it can draft: every chip reads those
  # of its part, of which it computes the logits;
  split_bytes: float = 0.0
  split_flops: float = 0.0  # their FLOPs per row and projected token
  target_bytes: float = 0.0  # the target's weights that the pass reads,
  target_flops: float = 0.0  # and their FLOPs per row and projected token
  position_bytes: float = 0.0  # KV read per row and cached position
  position_flops: float = 0.0  # attention, per token and cached position
  written_bytes: float = 0.0  # per row and token, beyond KV that it reads, too
  row_bytes: float = 0.0  # read per row: recurrent states
  # The same of layers with a window: (it, position_bytes, position_flops).
  windows: tuple[tuple[Window, float, float], ...] = ()
  logits: int = 0  # float32 logits per projected token, on every chip
  split_logits: int = 0  # those of which every chip has its part,
  gathered_logits: int = 0  # and those of which it computes its part, gets all
  # Of mixtures of experts: (bytes of one, its FLOPs per token, how many there
  # are, how many a token chooses), a layer each.
  experts: tuple[tuple[float, float, int, int], ...] = ()
  layers: int = 1  # sequential layers, for overhead per layer
  # All-reduces among the chips that share the target, beyond those of draws:
  # (how many in a pass, bytes of each per row and token).
  all_reduces: tuple[tuple[int, float], ...] = ()


NO_STEP = StepCost(layers=0)


@dataclasses.dataclass(frozen=True)
class DrafterCost:
  """What a drafter holds and reads, whatever the chip, batch and context.

  A draft step drafts one level. roofline.round_cost prices a round from it;
  the constructors are in roofline.drafter_cost and drafters.heads.cost.

  Attributes:
    weight_bytes: weights held beyond the target's; None: unknown.
    row_bytes: state held per row; None: unknown.
    position_bytes: state held per row and position, such as a KV cache; None:
      unknown.
    hidden_bytes: the target's hidden states held during prefill, per row and
      position.
    step: one draft step beyond the passes that `shape` and `exit_layer`
      describe; None: unknown.
    update: the pass after verification that re-runs the accepted path, if any,
    update_catch_up: and how many tokens per row it takes beyond one a level.
    steps: sequential draft steps of a round; None: one per level.
    tokens: per row of every draft step, whatever is drafted: the slots of a
      block; None: the nodes that a level runs, or with `steps` one a level.
    drafts_all: where a length policy cuts drafts, a round that has any still
      drafts all levels (with `exit_layer`: every round does).
    level: one more step for every level, such as a successor's; None: none.
    catch_up: tokens per row that the first step takes beyond the pending one,
    level_catch_up: and how many more for every level.
    shape: roofline.shapes.Shape of the decoder whose passes draft; None: none.
    shares_target: weights and cache of `shape` are the target's (layer skip).
    exit_layer: number of the target's first layers that every step runs and
      that verification skips; 0: none.
    exit_head: their output passes the target's final norm and head.
  """

  weight_bytes: float | None = 0.0
  row_bytes: float | None = 0.0
  position_bytes: float | None = 0.0
  hidden_bytes: float = 0.0
  step: StepCost | None = NO_STEP
  update: StepCost | None = None
  update_catch_up: int = 0
  steps: int | None = None
  tokens: int | None = None
  drafts_all: bool = False
  level: StepCost | None = None
  catch_up: int = 0
  level_catch_up: int = 0
  shape: Any = None
  shares_target: bool = False
  exit_layer: int = 0
  exit_head: bool = True

  @property
  def is_complete(self) -> bool:
    """Whether a round and the memory of this drafter can be priced."""
    sizes = (self.weight_bytes, self.row_bytes, self.position_bytes, self.step)
    return None not in sizes


NO_COST = DrafterCost(steps=0)  # drafts without a pass, as prompt lookup
UNKNOWN_COST = DrafterCost(None, None, None, step=None)


class AcceptanceRule(NamedTuple):
  """A distribution, not a sampler: unbatched, vmapped by decode, draws nothing.

  accept_prob(draft, target_log_probs) -> [N]: probability that node n is
    accepted, given that its parent is and that its earlier siblings were
    refused; with traversal 'last_success' given nothing, with 'post_order'
    that all nodes before it in post-order were refused (the root's is 1).
  residual(draft, target_log_probs, node) -> [V]: distribution of the token that
    follows when `node` is the last one accepted.
  In both, draft.tokens and draft.parents are [N], draft.log_probs [N, V] or
  None, draft.count [], target_log_probs [N, V] warped, float32. Nodes >= count
  were never drafted.

  Attributes:
    traversal: 'first_child'; 'last_success': of a chain, up to its last
      accepted node; 'post_order': to the first node accepted, children before
      their parent; 'longest': to the deepest node accepted with all its
      ancestors; 'coupled': decode reads neither function (accept_prob says
      what to expect).
    siblings: the kinds of siblings it is right for.
    lossless: whether the text has the target's distribution.
    caveat: what every print of its output must say; '': nothing.
    chains_only: it evaluates one path.
    most_chains: of i.i.d. children it evaluates only chains that share nothing
      but the root, so many at most; 0: any tree.
    name: for errors and tables.
  """

  accept_prob: Callable[[Draft, Array], Array] | None
  residual: Callable[[Draft, Array, Array], Array] | None
  traversal: str
  siblings: frozenset[str]
  lossless: bool
  caveat: str = ""
  chains_only: bool = False
  most_chains: int = 0
  name: str = "the rule"


# Where an emitted token came from: DecodeState.origin.
PROMPT, ACCEPTED, CORRECTION, BONUS, BASELINE = range(5)

# Whose distribution stopped a row, as it was not finite: DecodeState.fault.
NO_FAULT, TARGET_FAULT, DRAFT_FAULT = range(3)

NO_DRAFT = float("inf")  # is no log-probability; nan would stop debug_nans


@struct.dataclass
class Stats:
  """Counts of one generation, row by row; done rows count nothing."""

  rounds: Array  # [B] target passes
  emitted: Array  # [B] committed new tokens
  drafted: Array  # [B, D] rounds that drafted a token at depth d + 1; depths
  #                 after the length limit or an emitted EOS left out
  accepted: Array  # [B, D] rounds whose draft was accepted to depth d + 1
  evaluated: Array  # [B, D] rounds that evaluated depth d + 1: a token was
  #                   drafted there and all before it was accepted
  whole: Array  # [B] rounds that had room for all of the draft's depth
  kept: Array  # [B] tokens accepted in those rounds
  nodes: Array  # [B] drafted tokens that were verified
  widths: Array  # [W] rounds run at each static width, batch as a whole


@struct.dataclass
class DecodeState:
  """Everything a generation carries from one round to the next."""

  keys: Array  # [B] a random key a row
  tokens: Array  # [B, L] prompt and output; past `length` left as it was
  length: Array  # [B] committed tokens, the pending one included
  limit: Array  # [B] length at which a row stops
  done: Array  # [B] bool
  fault: Array  # [B] int8: NO_FAULT, or why the row was stopped
  sampling: Sampling
  target_cache: KVCache  # length = DecodeState.length - 1
  draft_state: PyTree
  stats: Stats
  log_probs: Array  # [B, L] of the target at temperature 1, without filters
  draft_log_probs: Array  # [B, L] of what the draft drew from; or NO_DRAFT
  origin: Array  # [B, L] int8, one of PROMPT .. BASELINE
  source: Source | None = None  # of an encoder-decoder
  outcomes: Outcomes | None = None  # None: the drafter asks for none
