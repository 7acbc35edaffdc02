"""How many tokens every row drafts in a round, decided level by level.

A policy is asked before a level is drafted, by whatever samples the draft
(draft_shape.py), and answers for all rows together, as one more level costs the
whole batch a draft step and a wider verification.

Rule 7, and why it is enough. Let F_d be what a policy has been given before
level d + 1 is drawn: outcomes of earlier rounds, and of this one the tokens of
levels 1 to d in all rows and the distributions that follow them. It sees no
noise. So F_d fixes which rows have a node d + 1; the noise that draws, accepts
and follows these nodes is of this round (rule 4: its address is the committed
length), thus independent of all earlier ones, and of that of levels 1 to d. The
claim: given F_d, in every row the text from its node d on, as a lossless rule
leaves it, has the target's distribution (for `block`, which weighs a path as a
whole: with the weight that this path has down to node d), independently of the
other rows. It holds where F_d makes d a leaf. Where it does not, the rows draw
their nodes d + 1 independently, F_(d+1) has it by induction, and the mean over
these draws is what the rule is exact for, whatever other rows do. At d = 0 it
says that texts are exact and rows independent. Coupled rules need none of this:
their text is a function of its own noise, however much of it is drafted.

What is not independent of the neighbours is how much a row drafts, and with it
the sample that an uncoupled row turns out to be.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import draft_shape
from specdec.draft_shape import DraftShape, LengthPolicy, Plan
from specdec.types import NEVER, Array, Context, Outcomes
from specdec.utils.constructors import cached

MOST = 64  # levels of a draft whose length is decided
# Edges of the classes of a draft token, by the probability of its acceptance
# as the draft sees it.
_EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
CLASSES = 1 + len(_EDGES)
_PRIOR = 0.7  # acceptance where nothing is known,
_WEIGHT = 16.0  # and after how many outcomes as much is due to these
_LEAST = 0.01  # of a rate that others are shrunk to
_HOPELESS = 0.02  # prefix acceptance at which a row stops
_EXPLORATION = 0.02  # most of the time that drafts which may not pay may take


def default_costs(k: int) -> tuple[float, ...]:
  """Returns a table for where none is known: a draft step costs a tenth of the
  target's pass, and each token of that a twentieth."""
  widths = draft_shape.step_widths(k)
  nodes = (min(w for w in widths if w > levels) for levels in range(k + 1))
  return tuple(
    1 + 0.1 * levels + 0.05 * (n - 1) for levels, n in enumerate(nodes)
  )


def check_costs(costs: Sequence[float], k: int) -> tuple[float, ...]:
  """Returns a table of k + 1 costs, checked.

  Raises:
    ValueError: there are not as many, or they are not finite, positive and
      ascending.
  """
  listed = isinstance(costs, list | tuple | np.ndarray)
  if not listed or not all(map(_is_number, costs)):
    raise ValueError(f"costs = {costs!r}; give a list of numbers")
  costs = tuple(float(cost) for cost in costs)
  steps = np.diff(costs)
  if len(costs) != k + 1:
    raise ValueError(
      f"{len(costs)} costs for k = {k}; give one for each of 0 .. k levels"
    )
  if not (np.isfinite(costs).all() and costs[0] > 0 and np.all(steps >= 0)):
    raise ValueError(f"costs {costs}: they must be finite, > 0 and ascending")
  if not (costs[0] >= 1e-30 and costs[-1] <= 1e30):
    raise ValueError(f"costs {costs}: they must be in 1e-30..1e30, of float32")
  return costs


def _is_number(x) -> bool:
  return isinstance(x, int | float | np.number) and not isinstance(x, bool)


def check_certainty(policy: LengthPolicy | None, name: str) -> None:
  """Raises ValueError where a policy reads the distributions of a draft, and
  the draft of this name has none."""
  if policy is not None and not policy.classes:
    raise ValueError(
      f"{name} drafts without a distribution, which shape = entropy reads; "
      "give k, or shape=adaptive(...)"
    )


def _active(context: Context) -> Array:
  """[B] bool: rows that still write."""
  done = context.done
  return context.length > 0 if done is None else ~done


class Rates(NamedTuple):
  """Acceptance by position [k] and by class [CLASSES]."""

  by_depth: Sequence[float]
  by_class: Sequence[float]

  @property
  def mean(self) -> float:
    """Acceptance of all tokens that are evaluated."""
    weights = np.cumprod([1.0, *self.by_depth[:-1]])
    return float(np.average(self.by_depth, weights=weights))


def unknown_rates(k: int) -> Rates:
  """Returns what is expected of a draft that has not been seen."""
  return Rates((_PRIOR,) * k, (_PRIOR,) * CLASSES)


def rates_of(outcomes: Outcomes) -> Rates:
  """Returns the rates of all rows, shrunk to `unknown_rates`."""
  unknown = unknown_rates(outcomes.by_depth.shape[1])
  by_depth, by_class, _ = _batch_rates(outcomes, unknown)
  return Rates(tuple(map(float, by_depth)), tuple(map(float, by_class)))


def _batch_rate(outcomes: Array, prior: Array | float) -> Array:
  """Shrinks (accepted, evaluated) [B, 2], summed over rows, to `prior` []."""
  kept, tried = jnp.sum(outcomes[..., 0]), jnp.sum(outcomes[..., 1])
  return (kept + _WEIGHT * jnp.clip(prior, _LEAST, 1.0)) / (tried + _WEIGHT)


def _batch_rates(
  outcomes: Outcomes, prior: Rates
) -> tuple[list[Array], list[Array], Array]:
  """Returns acceptance by position, by class, and of all tokens.

  Each is shrunk to its prior, times what the batch has accepted of the position
  before, or of all tokens, over the prior of that.
  """
  by_depth, ratio = [], 1.0
  for d, known in enumerate(prior.by_depth):
    by_depth.append(_batch_rate(outcomes.by_depth[:, d], ratio * known))
    ratio = by_depth[-1] / known
  mean = _batch_rate(jnp.sum(outcomes.by_depth, axis=1), prior.mean)
  by_class = [
    _batch_rate(outcomes.by_class[:, i], known * mean / prior.mean)
    for i, known in enumerate(prior.by_class)
  ]
  return by_depth, by_class, mean


def _row_rates(outcomes: Array, prior: Array) -> Array:
  """Shrinks (accepted, evaluated) [B, 2] to `prior` [B], or []."""
  prior = jnp.clip(prior, 0.0, 1.0)
  return (outcomes[..., 0] + _WEIGHT * prior) / (outcomes[..., 1] + _WEIGHT)


def _estimates(outcomes: Outcomes, prior: Rates) -> tuple[Array, Array]:
  """Acceptance by position [B, k] and by class [B, C] of every row.

  A row's own rate is shrunk to the batch's, times what the row has accepted of
  the position before, or of all tokens, over what the batch has: a row that
  accepts little will do so where it has not been seen yet.
  """
  depths, classes, mean = _batch_rates(outcomes, prior)
  by_depth, ratio = [], 1.0
  for d, rate in enumerate(depths):
    by_depth.append(_row_rates(outcomes.by_depth[:, d], ratio * rate))
    ratio = by_depth[-1] / rate
  ratio = _row_rates(jnp.sum(outcomes.by_depth, axis=1), mean) / mean
  by_class = [
    _row_rates(outcomes.by_class[:, i], ratio * rate)
    for i, rate in enumerate(classes)
  ]
  return jnp.stack(by_depth, axis=1), jnp.stack(by_class, axis=1)


def by_costs(
  costs: Sequence[float], catch_up: float = 0.0, prior: Rates | None = None
) -> LengthPolicy:
  """Drafts on while another level is expected to pay for what it costs.

  A row's prefix acceptance at depth d is the product of its tokens' acceptance
  so far, each by its class of certainty. Deeper levels are expected by
  position. Both are rates measured on this row, shrunk to the batch's, and
  these to what was expected; older outcomes fade. With s_i the prefix
  acceptance at depth i, summed over the A rows that are not done, a level is
  drafted if for some e > d (a width may hold several levels)

    s_(d+1) + .. + s_e  >=  rate (costs[e] - costs[d])

  where rate is what the batch writes at the best number of levels, by position:
  the largest (A + s_1 + .. + s_e) / costs[e] of all e before anything is drawn.
  Time is worth that much elsewhere, so whoever stops by it gains at least what
  that number does (Dinkelbach). A round's own quotient would not do: a lucky
  draft would be ended too early and an unlucky one too late.

  Once the batch has gone without a draft for so many rounds that it costs two
  percent at most, all rows that can draft one level, to see whether it pays by
  now; a row without hope tries as seldom where the others draft. Where the
  draft model would take as much to catch up alone, they never do again: every
  batch begins with such a round, for which its draft model is up to date. Where
  levels that are all accepted would not pay, nothing is tried.

  Args:
    costs: [k + 1] of a round that drafts 0 .. k levels, in any unit.
    catch_up: what a draft model takes for every round that it was left out of,
      in the same unit.
    prior: expected before there are outcomes; default `unknown_rates`.
  """
  levels = len(costs) - 1
  prior = prior or unknown_rates(levels)
  table = np.asarray(costs, np.float32)
  never_pays = np.all(np.arange(1, levels + 2) / table <= 1 / table[0])
  spare = _EXPLORATION * costs[0] - catch_up
  period = NEVER
  if spare > 0:
    period = math.ceil(round((costs[1] - costs[0]) / spare, 3))
    period = int(np.clip(period, 16, NEVER))

  def expected(going, depth, prefix, rates):
    """Prefix acceptance of rows going [B, k], and its sums over rows and levels
    past `depth` [k]."""
    deeper = jnp.arange(1, levels + 1) > depth  # [k]
    ahead = jnp.cumprod(jnp.where(deeper[None], rates, 1.0), axis=1)
    ahead = jnp.where(going[:, None], prefix[:, None] * ahead, 0.0)
    return ahead, jnp.cumsum(jnp.where(deeper, jnp.sum(ahead, axis=0), 0.0))

  def decide(ahead, gain, depth, rate):
    """Whether level depth + 1 pays, and the rows [B] that have a chance."""
    dearer = table[1:] - jnp.take(table, depth)
    deeper = jnp.arange(1, levels + 1) > depth
    pays = jnp.any(deeper & (gain >= rate * dearer))
    next_one = jnp.minimum(depth, levels - 1)
    return pays, jnp.take(ahead, next_one, axis=1) >= _HOPELESS

  def begin(context: Context, able: Array | None = None) -> Plan:
    active, outcomes = _active(context), context.outcomes
    rates = _estimates(outcomes, prior)
    going = active if able is None else active & able
    prefix = going * 1.0
    ahead, gain = expected(going, 0, prefix, rates[0])
    gains = jnp.concatenate([jnp.zeros(1), gain])
    rate = jnp.max((jnp.sum(active * 1.0) + gains) / table)
    pays, alive = decide(ahead, gain, 0, rate)
    alive |= outcomes.idle >= period
    tries = (jnp.min(outcomes.rest) >= period) & (not never_pays)
    going &= (pays & alive) | tries
    return Plan(going, (prefix, rate, *rates))

  def go_on(plan: Plan, depth, certainty: Array) -> Plan:
    prefix, rate, by_depth, by_class = plan.memory
    own = jnp.take_along_axis(by_class, certainty[:, None], axis=1)[:, 0]
    prefix = jnp.where(plan.going, prefix * own, prefix)
    memory = prefix, rate, by_depth, by_class
    expectation = expected(plan.going, depth, prefix, by_depth)
    pays, alive = decide(*expectation, depth, rate)
    return Plan(plan.going & pays & alive, memory)

  return LengthPolicy(begin, _classify, go_on, classes=CLASSES)


def _classify(probability: Array) -> Array:
  return jnp.sum(probability[:, None] >= jnp.array([_EDGES]), axis=1)


def by_entropy(limit: float, gamma: float) -> LengthPolicy:
  """AdaEDL (arXiv:2410.18351): stops where 1 - sqrt(gamma H(q)) < limit.

  The left side bounds acceptance from below; H in nats, of the draft's
  distribution before any warp. The token that would be drawn from it is not.
  """

  def admit(plan: Plan, logits: Array) -> Plan:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    # exp(-inf) * -inf is nan where a token is impossible
    terms = jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs) * log_probs, 0.0)
    bound = 1.0 - jnp.sqrt(gamma * -jnp.sum(terms, axis=-1))
    return plan._replace(going=plan.going & (bound >= limit))

  return LengthPolicy(
    begin=lambda context, able=None: Plan(
      _active(context) & (True if able is None else able)
    ),
    classify=draft_shape.unclassified,
    go_on=lambda plan, depth, certainty: plan,
    admit=admit,
  )


def count_levels(
  policy: LengthPolicy,
  context: Context,
  levels: Sequence[tuple[Array, Array]] | int,
  certainty: Array | None = None,
  able: Array | None = None,
) -> tuple[Array, Array]:
  """Asks a policy about levels whose tokens are there already.

  They were drafted at once, or are free: what the policy is given of them is
  what it would have been given before each was drawn.

  Args:
    levels: logits [B, V] before each level and the token [B] drawn there; or
      how many there are, of a draft without distributions.
    certainty: class of the tokens of such a draft, `policy.classify` of a
      probability or any other: [B] of all of them, or [B, levels]. It may
      depend on the tokens up to its own, never on later ones.
    able: [B] rows that have such a draft.

  Returns:
    Nodes in use [B], the root included, and certainty [B, N], the root's 0.
  """
  plan = policy.begin(context, able)
  count = jnp.ones_like(context.length)
  columns = [jnp.zeros_like(count)]
  drawn = levels
  if certainty is not None:
    drawn = range(levels)
    certainty = jnp.reshape(certainty, (count.size, -1))  # [B, 1 or levels]
    certainty = jnp.broadcast_to(certainty, (count.size, levels))
  for depth, level in enumerate(drawn, 1):
    if certainty is None:
      logits, token = level
      plan = policy.admit(plan, logits)
      sure = draft_shape.own_probability(logits, token)
      columns.append(policy.classify(sure))
    else:
      columns.append(certainty[:, depth - 1])
    count += plan.going
    plan = policy.go_on(plan, depth, columns[-1])
  return count, jnp.stack(columns, axis=1)


def check_k(k: int) -> None:
  """Raises ValueError where k is out of range."""
  if not 1 <= k <= MOST:
    raise ValueError(f"k = {k}; of what is decided it must be in 1..{MOST}")


def decided(k: int, policy: LengthPolicy) -> DraftShape:
  """Returns the shape of a chain of at most k tokens, as long as decided.

  Raises:
    ValueError: k is out of range.
  """
  check_k(k)
  whole = draft_shape.chain(k)

  def sample_tree(context, logits, run, carry, run_leaves=False):
    """Draws all levels; nodes that the policy would not have are not in use."""
    facing = [logits]

    def recorded(*args):
      carry, after = run(*args)
      if after is not None:
        facing.append(after[:, 0])
      return carry, after

    tree, carry = whole.sample_tree(
      context, logits, recorded, carry, run_leaves
    )
    levels = zip(facing, tree.draft.tokens.T[1:])
    count, certainty = count_levels(policy, context, [*levels])
    certainty = certainty if policy.classes else None
    draft = tree.draft._replace(count=count, certainty=certainty)
    return tree._replace(draft=draft), carry

  spec = whole.spec._replace(
    widths=draft_shape.step_widths(k), classes=policy.classes
  )
  return whole._replace(spec=spec, sample_tree=sample_tree, policy=policy)


@cached
def adaptive(
  k: int,
  costs: Sequence[float] | None = None,
  catch_up: float = 0.0,
  by_depth: Sequence[float] | None = None,
  by_class: Sequence[float] | None = None,
) -> DraftShape:
  """Returns chains of 0 to k tokens, as many as are expected to pay.

  `by_costs` says how the batch decides in every round.

  Args:
    k: 1 to 64.
    costs: [k + 1] of a round that drafts 0 .. k levels, verified at the
      smallest of `draft_shape.step_widths` that holds them, in any unit
      (`roofline.planning.step_costs`); default `default_costs`.
    catch_up: what a draft model takes for every round that it was left out of,
      in the same unit (`TargetDraftPair.catch_up`).
    by_depth: [k] acceptance of a token, all before it accepted, that is
      expected before there are outcomes; default 0.7 of all.
    by_class: [CLASSES] the same by what the draft says of its token, from the
      least certain to the surest; default 0.7 of all.

  Raises:
    ValueError: k is out of range, the costs are not k + 1 ascending ones,
      catch_up is no number >= 0, or rates are not as many, or not in 0..1.
  """
  check_k(k)
  costs = check_costs(default_costs(k) if costs is None else costs, k)
  if not (_is_number(catch_up) and 0 <= catch_up < math.inf):
    raise ValueError(f"catch_up = {catch_up!r}; it must be a number >= 0")
  unknown = unknown_rates(k)
  prior = Rates(
    _check_rates("by_depth", by_depth, unknown.by_depth),
    _check_rates("by_class", by_class, unknown.by_class),
  )
  return decided(k, by_costs(costs, float(catch_up), prior))


def _check_rates(
  name: str, rates: Sequence[float] | None, unknown: Sequence[float]
) -> tuple[float, ...]:
  """Returns rates, or those of what is unknown; none is under _LEAST."""
  rates = unknown if rates is None else rates
  listed = isinstance(rates, list | tuple | np.ndarray)
  if not (listed and all(_is_number(x) and 0 <= x <= 1 for x in rates)):
    raise ValueError(f"{name} = {rates!r}; give a list of numbers in 0..1")
  if len(rates) != len(unknown):
    raise ValueError(f"{name} has {len(rates)} rates; give {len(unknown)}")
  return tuple(max(float(x), _LEAST) for x in rates)


@cached
def entropy(k: int, limit: float = 0.4, gamma: float = 0.2) -> DraftShape:
  """Returns chains of 0 to k tokens that end where the draft is uncertain:
  AdaEDL's stop, `by_entropy`.

  Raises:
    ValueError: k is out of range, limit is above 1, or gamma is negative or
      infinite.
  """
  if not all(map(_is_number, (limit, gamma))):
    raise ValueError(
      f"limit = {limit!r} and gamma = {gamma!r}; they must be numbers"
    )
  if not (limit <= 1 and 0 <= gamma < math.inf):  # nor nan
    raise ValueError(
      f"limit = {limit} and gamma = {gamma}; they must satisfy limit <= 1 and "
      "0 <= gamma < inf"
    )
  return decided(k, by_entropy(limit, gamma))
