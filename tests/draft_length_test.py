"""Drafts whose length is decided in the loop: lossless, and worth it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  drafters,
  noise,
  sampling,
  stats,
)
from specdec.models import transformer
from specdec.testing import check_drafter, enumeration, table_model
from specdec.types import NEVER, Draft, Outcomes, Params, Skip, Stats
from text_statistics import SMALLEST_P, exact, p_value
from texts import texts

V, K, NEW = 3, 2, 3
MODEL = table_model.model(V)
PARAMS = Params(
  table_model.init_params(jax.random.key(0), V, 1.2),
  table_model.init_params(jax.random.key(1), V, 1.2),
)
SLOW = pytest.mark.slow
RULES = {
  rule.name: rule
  for rule in (
    acceptance.rejection(),
    acceptance.block(),
    acceptance.traversal(),
    acceptance.multipath(),
    acceptance.naive(),
    acceptance.kseq(),
    acceptance.coupled(),
  )
}


def by_tokens() -> draft_length.DraftShape:
  """Adversarial: a level is drafted by the last tokens of a row and of all, of
  those that were drawn by sixteenths of their probability."""

  def agreed(numbers):
    total = jnp.sum(numbers)
    return ((numbers + total) % 2 == 0) & (total % 3 > 0)

  def begin(context, able=None):
    return draft_shape.Plan(agreed(context.pending[:, 0]))

  def go_on(plan, depth, sixteenths):
    return draft_shape.Plan(plan.going & agreed(sixteenths))

  def classify(probability):
    return (16 * probability).astype(jnp.int32)

  policy = draft_shape.LengthPolicy(begin, classify, go_on)
  return draft_length.decided(K, policy)


# Costs by which every class of certainty, and either row, decides otherwise.
SHAPES = {
  "tokens": by_tokens(),
  "adaptive": draft_length.adaptive(K, [1.0, 1.45, 1.85]),
  "entropy": draft_length.entropy(K, limit=0.55),
}


def by_confidence() -> draft_length.DraftShape:
  """Adversarial: a level is drafted by the parity of the thousandths of how
  sure a block's confidence head is of all rows' tokens before it."""

  def go_on(plan, depth, odd):
    return draft_shape.Plan(plan.going & ((odd + jnp.sum(odd)) % 2 == 0))

  policy = draft_shape.LengthPolicy(
    begin=lambda context, able=None: draft_shape.Plan(context.length > 0),
    classify=lambda sure: (1000 * sure).astype(jnp.int32) % 2,
    go_on=go_on,
    classes=2,
  )
  return draft_length.decided(K, policy)


def drafter_of(name: str):
  return drafters.model(MODEL, shape=SHAPES[name])


def start(drafter, rule, rows, key=0, params=PARAMS, new=NEW, target=MODEL):
  """The state of `rows` rows before their first round."""
  return decode.start(
    target,
    drafter,
    rule,
    params,
    jnp.zeros((rows, 1), jnp.int32),
    jnp.ones((rows,), jnp.int32),
    jax.random.key(key) if isinstance(key, int) else key,
    max_length=1 + new,
    sampling=sampling.settings(rows, 1.0),
  )


def suspicious(state):
  """The state with outcomes by which the tokens of both rows decide whether
  they draft on: only if neither is one that the draft finds unlikely."""
  if state.outcomes is None or state.outcomes.by_class.shape[1] == 2:
    return state
  tried = 400.0 * jnp.ones_like(state.outcomes.by_class[..., 0])
  rare = jnp.arange(draft_length.CLASSES)[None] < 2
  pairs = jnp.stack([tried * jnp.where(rare, 0.1, 0.95), tried], axis=-1)
  by_depth = jnp.array([[[280.0, 400.0]] * K] * len(tried))
  outcomes = state.outcomes.replace(by_class=pairs, by_depth=by_depth)
  return state.replace(outcomes=outcomes)


def run(
  drafter,
  rule,
  state,
  params=PARAMS,
  rounds=decode.MAX_ROUNDS,
  target=MODEL,
):
  eos = jnp.array([-1])
  return decode.run(target, drafter, rule, params, state, eos, rounds)


# Exactly: one round of two rows, by enumeration of what both may draft.


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, state, forced):
  """The draft whose node n is forced[:, n] [B, N], where it can be drawn."""
  size = len(params.target["table"]) - 1

  def force(depth, node):
    del depth
    return 1e4 * jax.nn.one_hot(jnp.take(forced, node, axis=1), size)

  context = decode.step.context_of(state, size, acceptance.rejection())
  draft, _ = drafter.propose(params, state.draft_state, context._replace(
    noise=force))  # fmt: skip
  return draft


def joint_error(
  drafter, rule, rounds: int, target=MODEL, params=PARAMS
) -> tuple[float, set[int]]:
  """Largest error of P(text of row 0, text of row 1) after a round, and the
  lengths of drafts."""
  state = start(drafter, rule, 2, 0, params, 20, target)
  state = suspicious(run(drafter, rule, state, params, rounds, target))
  logits, tables = np.asarray(params.target["table"], float), []
  size = target.vocab_size
  tokens, length = np.asarray(state.tokens), np.asarray(state.length)
  for row in range(2):
    past = (size, *tokens[row, : length[row]])
    tables.append([
      np.array([
        enumeration.softmax(logits[(*past, *text)[-2:]], 1.0)
        for text in itertools.product(range(size), repeat=d)
      ]).reshape((size,) * (d + 1))
      for d in range(K + 1)
    ])  # fmt: skip

  @functools.cache
  def emitted(row, text, drawn, count):
    drawn = np.frombuffer(drawn, np.float32).reshape(1, K + 1, size)
    draft = enumeration.Drafts(
      np.ones(1), np.array([text], np.int32), np.array([[-1, 0, 1]]), drawn
    )
    return enumeration.emitted(rule, draft, tables[row], count=count).joint

  joint, lengths = 0.0, set()
  for pair in itertools.product(range(size), repeat=2 * K):
    forced = np.zeros((2, K + 1), np.int32)
    forced[:, 1:] = np.reshape(pair, (2, K))
    draft = jax.tree.map(np.asarray, propose(drafter, params, state, forced))
    weight, parts = 1.0, []
    for row in range(2):
      count = int(draft.count[row])
      drawn = np.exp(draft.log_probs[row])
      for node in range(1, K + 1):  # those that were not run have none
        run_ = abs(drawn[node].sum() - 1) < 1e-3
        weight *= drawn[node, draft.tokens[row, node]] if run_ else 1 / size
      drawn[[0, *range(count, K + 1)]] = 1 / size
      text = draft.tokens[row] * (np.arange(K + 1) < count)
      text[0] = 0
      parts.append(emitted(row, tuple(text), drawn.tobytes(), count))
      lengths.add(count)
    joint = joint + weight * np.multiply.outer(*parts)
  wanted = np.multiply.outer(*map(enumeration.text_distribution, tables))
  return float(np.abs(joint - wanted).max()), lengths


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rule", ["rejection", "block", "naive"])
def test_two_rows_that_decide_together_are_exact_and_independent(name, rule):
  errors, lengths = zip(
    *(joint_error(drafter_of(name), RULES[rule], rounds) for rounds in (0, 3))
  )
  assert max(errors) < 1e-6
  assert any(len(some) > 1 for some in lengths), lengths


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rows_that_decide_by_a_confidence_head_are_exact_and_independent(rule):
  drafter, params = learned_kinds.of_table("dspark", (), by_confidence())
  table = learned_kinds.STREAMS
  errors, lengths = zip(
    *(joint_error(drafter, RULES[rule], n, table, params) for n in (0, 3))
  )
  assert max(errors) < 1e-6
  assert any(len(some) > 1 for some in lengths), lengths


def test_a_confidence_that_has_seen_the_token_s_own_noise_is_caught():
  """The level is there by what its own noise will draw."""
  honest, params = learned_kinds.of_table("dspark", (), draft_shape.chain(K))

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    next_one = jnp.argmax(context.noise(2, 2), axis=-1)
    count = jnp.where(next_one == 1, 2, K + 1)
    return draft._replace(count=count), state

  spec = honest.spec._replace(widths=draft_shape.step_widths(K))
  drafter = honest._replace(spec=spec, propose=propose)
  table = learned_kinds.STREAMS
  assert joint_error(drafter, RULES["rejection"], 0, table, params)[0] > 1e-4


def dropping(unwanted):
  """A drafter that leaves out nodes: unwanted(draft, node) -> [B] bool."""
  honest = drafters.model(MODEL, K)

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    going, count = jnp.ones_like(draft.count, bool), 1
    for node in range(1, K + 1):
      going &= ~unwanted(draft, node)
      count += going
    return draft._replace(count=count), state

  spec = honest.spec._replace(widths=draft_shape.step_widths(K))
  return honest._replace(spec=spec, propose=propose)


def peeks(draft, node):
  """A level's own token decides whether the level is there."""
  return draft.tokens[:, node] == 1


def trims(draft, node):
  """What was drawn and is unlikely is not verified."""
  drawn = jnp.take_along_axis(draft.log_probs, draft.tokens[..., None], 2)
  return drawn[:, node, 0] < jnp.log(0.4)


def looks_at_neighbours(draft, node):
  """The other row's token of this very level: each row alone would be exact,
  both together are not independent."""
  return draft.tokens[::-1, node] == 1


@pytest.mark.parametrize("bug", [peeks, trims, looks_at_neighbours])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_decisions_by_the_token_itself_are_caught(bug, rule):
  assert joint_error(dropping(bug), RULES[rule], 0)[0] > 1e-4


# By chi-square: the loop, round after round, in batches of two rows.


def texts_of(drafter, rule, groups, params=PARAMS):
  """[2 groups, NEW] tokens of batches of two rows, each with its own key."""

  @jax.jit
  def decoded(key):
    state = suspicious(start(drafter, rule, 2, key, params))
    return run(drafter, rule, state, params).tokens[:, 1:]

  keys = jax.random.split(jax.random.key(7), groups)
  return np.asarray(jax.vmap(decoded)(keys)).reshape(-1, NEW)


def p_of(drafter, rule, params=PARAMS, groups=10_000) -> float:
  joint = exact(((0,), 1.0, V, 1.0), params)
  joint = joint.sum(axis=tuple(range(NEW, joint.ndim)))
  return p_value(texts_of(drafter, rule, groups, params), joint)


DUE = {("tokens", "block"), ("adaptive", "rejection")}


@pytest.mark.parametrize(
  "name, rule",
  [
    pytest.param(*case, marks=() if case in DUE else SLOW)
    for case in itertools.product(SHAPES, RULES)
  ],
)
def test_20000_texts_follow_the_distribution(name, rule):
  assert p_of(drafter_of(name), RULES[rule]) > SMALLEST_P


@pytest.mark.parametrize("bug", [peeks, pytest.param(trims, marks=SLOW)])
def test_texts_by_the_token_itself_are_caught(bug):
  assert p_of(dropping(bug), RULES["rejection"], groups=2000) < SMALLEST_P


def by_accept_draws(key):
  """A row drafts where the uniform that accepts its first token is small."""
  honest = drafters.model(MODEL, K)

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    keys = noise.row_keys(key, jnp.arange(len(draft.count)))
    keys = noise.fold(keys, noise.ACCEPT, context.length, 1)
    small = jax.vmap(jax.random.uniform)(keys) < 0.5
    return draft._replace(count=jnp.where(small, draft.count, 1)), state

  spec = honest.spec._replace(widths=(1, K + 1))
  return honest._replace(spec=spec, propose=propose)


def test_a_decision_that_has_seen_the_accept_draws_is_caught():
  key, rule, rows = jax.random.key(3), RULES["rejection"], 20_000
  joint = exact(((0,), 1.0, V, 1.0)).sum(axis=-1)
  p = {}
  for name, seen in (("own", key), ("other", jax.random.key(4))):
    drafter = by_accept_draws(seen)
    state = run(drafter, rule, start(drafter, rule, rows, key))
    p[name] = p_value(np.asarray(state.tokens[:, 1:]), joint)
  assert p["own"] < SMALLEST_P < p["other"]


# Coupled text, whoever the neighbours are.


@pytest.mark.parametrize("name", SHAPES)
def test_coupled_text_is_plain_text_among_any_neighbours(name):
  drafter, rule = drafter_of(name), RULES["coupled"]
  plain = start(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, 6, new=12)
  plain = run(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, plain).tokens
  for rows in (6, 2):
    state = run(drafter, rule, start(drafter, rule, rows, new=12))
    np.testing.assert_array_equal(state.tokens, plain[:rows])
    assert np.count_nonzero(state.stats.widths) > 1


def test_recycling_drafts_no_more_than_is_decided():
  dear = draft_length.adaptive(K, [1.0, 9.0, 99.0])
  drafted = {}
  for name, shape in (
    ("whole", draft_shape.chain(K)),
    ("dear", dear),
  ):
    drafter, rule = drafters.recycling(V, shape=shape), RULES["rejection"]
    state = run(drafter, rule, start(drafter, rule, 6, new=12))
    drafted[name] = int(jnp.sum(state.stats.drafted))
  assert drafted["whole"] > drafted["dear"] == 0


DEAR = draft_length.adaptive(2, [1.0, 9.0, 99.0])
IDLE = {
  "early_exit": lambda target: drafters.early_exit(target, 1, shape=DEAR),
  "layer_skip": lambda target: drafters.layer_skip(
    target, Skip((1,)), shape=DEAR
  ),
  "quantized": lambda target: drafters.quantized(target, shape=DEAR),
}


@pytest.mark.parametrize("name", IDLE)
def test_the_target_drafts_nothing_for_itself_where_no_row_is_to_draft(name):
  """Nor is there room made for a draft's distributions."""
  target, params = learned_kinds.target()
  honest, calls = IDLE[name](target), []

  def propose(*args):
    jax.debug.callback(lambda: calls.append(name))
    return honest.propose(*args)

  drafter = honest._replace(propose=propose)
  state = learned_kinds.speculate(drafter, RULES["coupled"], params)
  jax.effects_barrier()
  assert texts(state) == learned_kinds.baseline()
  assert not calls


# The kit, but for rows and slots: which sample an uncoupled row becomes is up
# to all that are or were there.

TABLE, TABLES = learned_kinds.TABLE, learned_kinds.TABLES
ADAPTIVE = draft_length.adaptive(3, [1.0, 1.2, 1.5, 1.8])
ENTROPY = draft_length.entropy(3, 0.5)


@pytest.mark.parametrize(
  "drafter",
  [
    lambda: drafters.model(TABLE, shape=ADAPTIVE),
    pytest.param(lambda: drafters.model(TABLE, shape=ENTROPY), marks=SLOW),
    pytest.param(
      lambda: drafters.lookup(shape=ADAPTIVE, ngram=2, min_ngram=1), marks=SLOW
    ),
    pytest.param(lambda: drafters.suffix(shape=ADAPTIVE), marks=SLOW),
  ],
)
def test_drafters_of_a_table(drafter):
  rules = RULES["rejection"], RULES["block"]
  check_drafter(drafter, TABLE, TABLES, rules=rules, skip=["rows", "slots"])


@pytest.mark.slow
@pytest.mark.parametrize(
  "drafter",
  [
    lambda target: drafters.early_exit(
      target, 1, shape=draft_length.entropy(3, 0.305)
    ),
    pytest.param(
      lambda target: drafters.early_exit(target, 1, shape=ADAPTIVE), marks=SLOW
    ),
    pytest.param(
      lambda target: drafters.layer_skip(target, Skip((1,)), shape=ADAPTIVE),
      marks=SLOW,
    ),
  ],
)
def test_drafters_of_a_transformer(drafter):
  config = learned_kinds.TARGET
  target = transformer.model(config)
  weights = jax.tree.map(
    lambda x: 3 * x, transformer.init_params(config, jax.random.key(0))
  )
  stats = check_drafter(
    lambda: drafter(target),
    target,
    Params(weights),
    rules=[RULES["rejection"]],
    skip=["rows", "slots"],
  )
  assert np.count_nonzero(stats.widths) > 1


@pytest.mark.parametrize(
  "kind",
  [pytest.param(kind, marks=SLOW) for kind in ("eagle3", "medusa", "dspark")],
)
def test_draft_heads(kind):
  target, params = learned_kinds.target()
  shape = draft_length.adaptive(3, [1.0, 1.5, 1.9, 2.4])
  head = learned_kinds.draft_head(kind, True)
  drafter = drafters.from_head(head, target, shape)
  params = Params(params, learned_kinds.weights(kind, True))
  rules = [RULES["rejection"]]
  stats = check_drafter(
    drafter, target, params, rules=rules, skip=["rows", "slots"]
  )
  assert np.count_nonzero(stats.widths) > 1


# What is decided.


def context_of(acceptance_by_depth, done, rest=0, evidence=1000.0, idle=None):
  """Of rows with much evidence, [B, D] rates; idle is rest unless given."""
  rates = np.asarray(acceptance_by_depth, float)
  pairs = np.stack([evidence * rates, 0 * rates + evidence], axis=-1)
  classes = np.repeat(pairs[:, :1], draft_length.CLASSES, axis=1)
  rows = len(rates)
  state = start(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, rows)
  return decode.step.context_of(state, V, RULES["coupled"])._replace(
    done=jnp.asarray(done),
    outcomes=Outcomes(
      jnp.asarray(pairs),
      jnp.asarray(classes),
      jnp.broadcast_to(jnp.asarray(rest if idle is None else idle), rows),
      jnp.broadcast_to(jnp.asarray(rest), rows),
    ),
  )


def levels_of(costs, context, certainty=0, able=None, prior=None):
  """How many levels each row drafts."""
  rows, levels = len(context.length), len(costs) - 1
  count, _ = draft_length.count_levels(
    draft_length.by_costs(tuple(costs), 0.0, prior),
    context,
    levels,
    jnp.full((rows,), certainty),
    able if able is None else jnp.array(able),
  )
  return (np.asarray(count) - 1).tolist()


@pytest.mark.parametrize(
  "rates, done, costs, levels",
  [
    ([[0.9, 0.9, 0.9]], [False], [1, 1.1, 1.2, 1.3], [3]),
    # 1.9 / 1.5 > 1, and 2.71 / 2.3 < 1.9 / 1.5.
    ([[0.9, 0.9, 0.9]], [False], [1, 1.5, 2.3, 3.0], [1]),
    ([[0.4, 0.4, 0.4]], [False], [1, 1.5, 2.0, 2.5], [0]),
    # A step of the table that two more levels pay for, and one would not.
    ([[0.9, 0.9, 0.9]], [False], [1, 1.95, 1.95, 1.95], [3]),
    # 5 tokens in 1.6 are fewer than 4 in 1: the good row waits for the others,
    ([[1, 1]] + 3 * [[0, 0]], 4 * [False], [1, 1.6, 2.2], [0, 0, 0, 0]),
    # until they are done, which is when only it counts.
    ([[1, 1]] + 3 * [[0, 0]], [False] + 3 * [True], [1, 1.6, 2.2],
     [2, 0, 0, 0]),
    # A row without hope stops where the others go on.
    ([[0, 0]] + 3 * [[1, 1]], 4 * [False], [1, 1.1, 1.2], [0, 2, 2, 2]),
  ],
)  # fmt: skip
def test_levels_are_drafted_while_they_pay(rates, done, costs, levels):
  assert levels_of(costs, context_of(rates, done)) == levels


@pytest.mark.parametrize("certainty, levels", [([6, 0, 6], 2), ([6] * 3, 3)])
def test_tokens_that_are_there_at_once_may_differ_in_certainty(
  certainty, levels
):
  context = context_of([[0.9, 0.9, 0.9]], [False])
  refused = context.outcomes.by_class.at[:, 0, 0].set(0.0)  # of class 0
  outcomes = context.outcomes.replace(by_class=refused)
  count, classes = draft_length.count_levels(
    draft_length.by_costs((1, 1.1, 1.2, 1.3)),
    context._replace(outcomes=outcomes),
    3,
    jnp.array([certainty]),
  )
  assert count.tolist() == [1 + levels]
  assert classes.tolist() == [[0, *certainty]]


def test_one_level_is_tried_now_and_then():
  """Of 0.6 passes more, after 30 rounds: two percent of the time."""
  costs, rates = [1, 1.6, 2.2], [[0.1, 0.1]] * 2
  for rest, done, levels in (
    (29, [False, False], [0, 0]),
    (30, [False, False], [1, 1]),
    ([30, NEVER], [False, False], [1, 1]),  # whose neighbour has just come
    ([29, NEVER], [False, False], [0, 0]),
    ([30, NEVER], [True, False], [0, 1]),
  ):
    context = context_of(rates, done, rest)
    assert levels_of(costs, context) == levels
  too_dear = [1, 2.1, 3.1]  # whatever is accepted
  context = context_of(rates, [False, False], NEVER)
  assert levels_of(too_dear, context) == [0, 0]


def test_a_row_without_hope_tries_now_and_then_where_others_draft():
  costs, rates = [1, 1.6, 2.2], [[0, 0]] + 3 * [[1, 1]]
  for idle, levels in ((29, [0, 2, 2, 2]), (30, [1, 2, 2, 2])):
    context = context_of(rates, 4 * [False], idle=[idle, 0, 0, 0])
    assert levels_of(costs, context) == levels


@pytest.mark.parametrize("catch_up, rounds", [(0.005, 40), (0.02, None)])
def test_what_it_takes_to_catch_up_is_part_of_a_try(catch_up, rounds):
  policy = draft_length.by_costs((1, 1.6, 2.2), catch_up)

  def tries(idle):
    context = context_of([[0.1, 0.1]] * 2, [False] * 2, idle)
    return bool(policy.begin(context, None).going.all())

  if rounds:
    assert tries(rounds) and not tries(rounds - 1)
  else:
    assert not tries(10**6)


@pytest.mark.parametrize("able", [[True, False], [True, True]])
def test_rows_that_have_waited_longer_try_no_sooner(able):
  """Copies come now in this row, now in that one: were each to try because it
  has not for long, some would in every round, whether that pays or not."""
  costs, rates, done = [1, 1.6, 2.2], [[0.1, 0.1]] * 2, [False, False]
  for rest, levels in ((3, [0, 0]), (30, [int(one) for one in able])):
    context = context_of(rates, done, rest, idle=[1000, 1000])
    assert levels_of(costs, context, able=able) == levels


def test_a_batch_rests_until_any_of_its_rows_drafts():
  """Also where a row of it was exchanged, which has never drafted."""
  outcomes = Outcomes(
    jnp.zeros((3, 1, 2)), jnp.zeros((3, 1, 2)), jnp.array([4, 9, 0]),
    jnp.array([4, 4, NEVER]),
  )  # fmt: skip
  of_row, of_depth = jnp.zeros(3, int), jnp.zeros((3, 1), int)
  names = dict.fromkeys(("drafted", "accepted", "evaluated"), of_depth)
  names |= dict.fromkeys(("rounds", "emitted", "whole", "kept"), of_row)
  before = Stats(**names, nodes=of_row, widths=jnp.zeros(2, int))
  draft = Draft(jnp.zeros((3, 2), int), jnp.array([-1, 0]), None, 2)
  for drafted, idle, rest in (
    ([0, 0, 0], [5, 10, 1], [5, 5, 5]),
    ([0, 1, 0], [5, 0, 1], [0, 0, 0]),
  ):
    after = before.replace(drafted=jnp.array(drafted)[:, None])
    new = stats.remember(outcomes, draft, before, after)
    assert new.idle.tolist() == idle and new.rest.tolist() == rest


@pytest.mark.parametrize(
  "by_depth, certainty, levels",
  [
    ([0.9, 0.9, 0.9], 0, 3),
    ([0.9, 0.9, 0.1], 0, 2),
    ([0.2, 0.2, 0.2], 0, 0),
    ([0.9, 0.9, 0.9], 1, 1),  # the draft says that its token is a bad one
  ],
)
def test_what_is_expected_before_there_are_outcomes(
  by_depth, certainty, levels
):
  context = context_of([[0.0, 0.0, 0.0]], [False], evidence=0.0)
  by_class = [0.9, 0.1, *[0.9] * (draft_length.CLASSES - 2)]
  prior = draft_length.Rates(by_depth, by_class)
  costs = [1, 1.3, 1.6, 1.9]
  assert levels_of(costs, context, certainty, prior=prior) == [levels]


def test_rates_of_a_pilot_are_what_its_rows_accepted():
  context = context_of([[0.9, 0.5], [0.7, 0.1]], [False] * 2, evidence=1e4)
  rates = draft_length.rates_of(context.outcomes)
  np.testing.assert_allclose(rates.by_depth, [0.8, 0.3], atol=0.01)
  np.testing.assert_allclose(rates.by_class, 0.8, atol=0.01)
  nothing = context_of([[0.0, 0.0]], [False], evidence=0.0).outcomes
  for rates in draft_length.rates_of(nothing):
    np.testing.assert_allclose(rates, 0.7, rtol=1e-6)


@pytest.mark.parametrize(
  "rates", [{"by_depth": [0.5]}, {"by_depth": [0.5, 1.5]}, {"by_class": 0.5}]
)
def test_rates_that_cannot_be_are_refused(rates):
  with pytest.raises(ValueError, match=f"{next(iter(rates))} "):
    draft_length.adaptive(2, (1.0, 1.2, 1.4), **rates)


def test_rows_of_one_batch_are_told_apart():
  """What is measured on a row counts more than what is on the others."""
  context = context_of([[0.9, 0.9], [0.2, 0.2]], [False] * 2, evidence=80.0)
  rates = draft_length.by_costs((1.0, 1.2, 1.4)).begin(context, None).memory[2]
  np.testing.assert_allclose(rates[:, 0], [0.84, 0.26], atol=0.01)


GOOD = [(0, 1, 1), (1, 1, 0), (1, 0, 1)]  # before it, last token, what follows
BAD = [(2, 3, 3), (3, 3, 2), (3, 2, 3)]


def cycles(*wrong):
  """Logits of two cycles of three tokens; `wrong` cycles are left at once."""
  table = np.zeros((5, 4, 4), np.float32)
  for cycle in (GOOD, BAD):
    for before, last, following in cycle:
      table[before, last, following ^ 2 if cycle in wrong else following] = 20
      table[4, last, last | 1] = 20  # of a text of one token
  return {"table": jnp.asarray(table)}


def rounds_of(params_by_round, limit, costs, catch_up=0.0):
  """Levels drafted in every round, and the last state."""
  target, rows = table_model.model(4), len(limit)
  drafter = drafters.model(
    target, shape=draft_length.adaptive(len(costs) - 1, costs, catch_up)
  )
  prompt = jnp.array([[0, 1, 1]] + [[2, 3, 3]] * (rows - 1))
  parts = target, drafter, RULES["rejection"]
  state = decode.start(
    *parts,
    params_by_round(0),
    prompt,
    jnp.full((rows,), 3),
    jax.random.key(0),
    max_length=max(limit),
    limit=jnp.asarray(limit),
    sampling=sampling.settings(rows),
  )
  levels, number = [], 0
  while not bool(jnp.all(state.done)):
    before = np.asarray(state.stats.widths)
    state = decode.run(
      *parts, params_by_round(number), state, jnp.array([-1]), 1
    )
    width = int(np.argmax(np.asarray(state.stats.widths) - before))
    levels.append(drafter.spec.widths[width] - 1)
    number += 1
  return levels, state


def check_cycles(state):
  """Rows continue their cycle: greedy text, whatever was drafted."""
  for row, length in enumerate(np.asarray(state.length)):
    cycle = [0, 1, 1] if row == 0 else [2, 3, 3]
    wanted = (cycle * 200)[:length]
    assert np.asarray(state.tokens)[row, :length].tolist() == wanted


def test_a_batch_stops_drafting_and_begins_again_as_rows_finish():
  params = Params(cycles(), cycles(BAD))
  levels, state = rounds_of(
    lambda _: params, [130, 45, 45, 45], [1, 1.5, 1.9], catch_up=1.0
  )
  check_cycles(state)
  first = levels.index(0)
  back = first + next(i for i, k in enumerate(levels[first:]) if k)
  assert first < 10  # it did try
  assert 38 <= back <= 44  # nothing pays before the others are done
  assert min(levels[back:]) >= 1 and levels[-1] == 2
  # All of these were accepted: the draft's cache has caught up.
  counts = state.stats
  assert int(counts.accepted[0].sum()) == int(counts.drafted[0].sum())


@pytest.mark.parametrize("wrong, pays", [((), 1), ((GOOD, BAD), 0)])
def test_a_batch_begins_with_a_try_that_may_be_its_only_one(wrong, pays):
  """By what is usual no level pays here, and catching up costs too much."""
  params = Params(cycles(), cycles(*wrong))
  levels, _ = rounds_of(lambda _: params, [24] * 40, [1, 1.8], catch_up=0.1)
  assert levels[0] == 1 and {*levels[1:]} == {pays}


def test_drafting_begins_again_when_acceptance_rises():
  bad, good = Params(cycles(), cycles(GOOD)), Params(cycles(), cycles())
  rounds = 150
  levels, state = rounds_of(
    lambda number: bad if number < rounds else good, [450], [1, 1.6, 2.2]
  )
  check_cycles(state)
  idle = levels[20:rounds]
  assert 1 <= np.count_nonzero(idle) <= 1 + len(idle) // 30
  assert max(idle) == 1  # one level, to see
  assert levels[-1] == 2


@pytest.mark.parametrize(
  "make, sentence",
  [
    (lambda: draft_length.adaptive(0), r"it must be in 1..64"),
    (lambda: draft_length.adaptive(2, [1, 2]), "2 costs for k = 2; give one"),
    (lambda: draft_length.adaptive(1, [2, 1]), "finite, > 0 and ascending"),
    (lambda: draft_length.adaptive(1, "12"), "'12'; give a list of numbers"),
    (lambda: draft_length.adaptive(1, 5), "costs = 5; give a list of numbers"),
    (lambda: draft_length.adaptive(1, ["a", 2]), "give a list of numbers"),
    (
      lambda: draft_length.adaptive(1, [1, np.nan]),
      "finite, > 0 and ascending",
    ),
    (lambda: draft_length.adaptive(1, [1, 1e39]), r"1e-30\.\.1e30, of float32"),
    (lambda: draft_length.adaptive(1, [1e-50, 1]), r"1e-30\.\.1e30"),
    (lambda: draft_length.entropy(2, 1.5), "limit <= 1"),
    (lambda: draft_length.entropy(2, np.nan), "limit <= 1"),
    (lambda: draft_length.entropy(2, gamma=np.inf), "gamma < inf"),
    (lambda: draft_length.entropy(2, "nan"), "'nan' .* must be numbers"),
    (lambda: drafters.lookup(shape=ENTROPY), "lookup drafts without a distri"),
    (
      lambda: drafters.layer_skip(
        transformer.model(learned_kinds.TARGET),
        Skip((1,)),
        threshold=drafters.Threshold(),
        shape=ADAPTIVE,
      ),
      "a threshold ends chains",
    ),
  ],
)
def test_bad_arguments(make, sentence):
  with pytest.raises(ValueError, match=sentence):
    make()
