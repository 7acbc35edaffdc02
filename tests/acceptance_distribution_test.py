"""Every rule with every shape of draft: exact distributions, over all drafts.

Single rounds under distributions that break things; whole generations, whose
rounds begin wherever the one before ended; what a round accepts; planted bugs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from distribution import (
  CHAINS,
  DEEP,
  EXACT,
  PAIR,
  PLANTED,
  SIBLINGS,
  TRIPLE,
  check,
  distributions,
  flat,
  planted,
)
from specdec import acceptance, draft_shape, draft_tree, sampling
from specdec.acceptance.distributions import prob_of_tokens, ratio
from specdec.testing import enumeration
from specdec.traversal import TRAVERSALS
from specdec.types import Context, Draft

V = 3
RULES = {
  "rejection": acceptance.rejection(),
  "kseq": acceptance.kseq(),
  "block": acceptance.block(),
  "traversal": acceptance.traversal(),
  "naive": acceptance.naive(),
  "greedy": acceptance.greedy(),
}
SHAPES = {
  "chain": (CHAINS[3], ("none", "deterministic")),
  "siblings": (TRIPLE, SIBLINGS),
  "tree": (DEEP, SIBLINGS),
  "chains": (draft_tree.parallel(2, 2), SIBLINGS),
  "shared": (draft_tree.parallel(2, 3, 1), SIBLINGS),
  "dynamic": (None, ("dynamic",)),
}
# Distributions whose tokens do not depend on the past: (draft's, target's).
DEGENERATE = {
  "disjoint supports": ([0.3, 0.7, 0], [0, 0, 1]),
  "one-hot and apart": ([1, 0, 0], [0, 0, 1]),
  "one-hot and equal": ([0, 1, 0], [0, 1, 0]),  # 0 / 0 in the residual
  "one-hot draft": ([0, 1, 0], [0.1, 0.4, 0.5]),
  "one-hot target": ([0.3, 0.4, 0.3], [0, 1, 0]),
  "equal": ([0.1, 0.3, 0.6], [0.1, 0.3, 0.6]),  # no residual
  "equal, with zeros": ([0.5, 0.5, 0], [0.5, 0.5, 0]),
  "used up by two siblings": ([0.1, 0.9, 0], [0.5, 0.5, 0]),
  "used up by one": ([1, 0, 0], [0.5, 0.3, 0.2]),
  "tiny": ([1e-7, 1 - 1e-7, 0], [0.5, 0, 0.5]),
}


def pairs():
  """(rule, shape, kind of siblings) that go together."""
  for (name, rule), (shape, (_, kinds)) in itertools.product(
    RULES.items(), SHAPES.items()
  ):
    for kind in kinds:
      siblings = "deterministic" if kind == "dynamic" else kind
      chain = shape == "chain" or not rule.chains_only
      if siblings in rule.siblings and chain:
        yield name, shape, kind


PAIRS = [*pairs()]


def dynamic_drafts(shape, draft_distributions) -> enumeration.Drafts:
  """The one draft that a shape of deterministic children gives."""
  tokens_run = [0]

  def run(carry, tokens, parents, first, need_logits):
    assert need_logits and first == len(tokens_run)
    tokens_run.extend(int(token) for token in tokens[0])
    tree = np.asarray(parents).reshape(-1)
    rows = []
    for node in range(first, len(tokens_run)):
      text = tuple(tokens_run[n] for n in enumeration.path_of(tree, node))
      rows.append(draft_distributions[len(text)][text])
    return carry, jnp.asarray(enumeration.log(rows))[None]

  context = Context(
    jnp.zeros((1, 1), jnp.int32),
    jnp.ones((1,), jnp.int32),
    sampling.settings(1, 1.0),
    None,
    None,
  )
  root = jnp.asarray(enumeration.log(draft_distributions[0]))[None]
  tree, _ = shape.sample_tree(context, root, run, None)
  return enumeration.Drafts(
    np.ones(1),
    np.asarray(tree.draft.tokens),
    np.asarray(tree.draft.parents),
    None,
  )


def depth_of(shape) -> int:
  return 3 if shape == "dynamic" else distribution.max_depth(SHAPES[shape][0])


def drafts_of(shape, kind, draft_distributions) -> enumeration.Drafts:
  """All drafts; the dynamic tree by its own code, one for each text."""
  if kind == "dynamic":
    return dynamic_drafts(draft_shape.dynamic(2, 3, 4), draft_distributions)
  return enumeration.drafts(kind, SHAPES[shape][0], draft_distributions)


def one_round(rule, shape, kind, draft, target) -> enumeration.Outcome:
  return enumeration.emitted(
    RULES[rule],
    drafts_of(shape, kind, draft),
    target[: depth_of(shape) + 1],
    traced=kind == "dynamic",
  )


def accepts_all(rule, shape, kind, warp) -> bool:
  """Whether a target's own draft is accepted whole.

  Deterministic children are its distribution at temperature 0 only, and a
  second child that has one draft token below it may be the one accepted.
  """
  if rule not in ("rejection", "kseq", "block", "traversal"):
    return False
  sampled = kind not in ("deterministic", "dynamic")
  return warp == "greedy" or (sampled and (shape, kind) != ("tree", "iid"))


@pytest.mark.parametrize("rule, shape, kind", PAIRS)
def test_b12_b26_a_round_leaves_the_targets_distribution(rule, shape, kind):
  """Under every warp and under distributions without a common support; the
  target's own draft is accepted whole.
  """
  depth = depth_of(shape)
  cases = {name: distributions(V, depth, name) for name in distribution.WARPS}
  if rule == "greedy":
    cases = {"greedy": cases["greedy"]}
  for name, (_, target) in cases.items():
    if accepts_all(rule, shape, kind, name):
      outcome = one_round(rule, shape, kind, target, target)
      tolerance = 1e-5 if rule == "kseq" else 1e-6
      np.testing.assert_allclose(outcome.accepted, depth, atol=tolerance)
  if rule != "greedy":
    for name, (draft, target) in DEGENERATE.items():
      cases[name] = flat(draft, depth), flat(target, depth + 1)
  for name, (draft, target) in cases.items():
    outcome = one_round(rule, shape, kind, draft, target)
    assert np.isfinite(outcome.accepted), name
    assert distribution.error(outcome, target) < EXACT, name


LENGTH = 3  # tokens of a whole generation


@pytest.mark.parametrize("rule, shape, kind", PAIRS)
def test_whole_generations_follow_the_targets_distribution(rule, shape, kind):
  """Rounds begin where the one before ended, whatever it accepted."""
  warp = "greedy" if rule == "greedy" else "baseline"
  draft, target = distributions(V, LENGTH + 3, warp, seed=3)

  def after(text):
    ours, theirs = (enumeration.after(x, text) for x in (draft, target))
    return one_round(rule, shape, kind, ours, theirs)

  joint = enumeration.generated(after, V, LENGTH)
  exact = enumeration.text_distribution(target[:LENGTH])
  np.testing.assert_allclose(joint, exact, atol=EXACT)


# What a round accepts.


@pytest.mark.parametrize("warp", distribution.WARPS)
@pytest.mark.parametrize("k", CHAINS)
def test_chains_are_accepted_as_the_papers_say(k, warp):
  for seed in (k, k + 20):
    draft, target = distributions(4, k, warp, seed)
    accepted = {
      name: check(rule, CHAINS[k], "none", draft, target).accepted
      for name, rule in RULES.items()
      if name != "greedy"
    }
    expected = {
      "rejection": distribution.chain_acceptance(draft, target),
      "kseq": distribution.chain_acceptance(draft, target),
      "block": distribution.block_acceptance(draft, target),
      "traversal": distribution.block_acceptance(draft, target),
    }
    for name, value in expected.items():
      np.testing.assert_allclose(accepted[name], value, atol=1e-6)
    assert accepted["naive"] <= accepted["rejection"] + 1e-6
    assert accepted["rejection"] <= accepted["block"] + 1e-6
    if k == 1:
      naive = float(np.sum(draft[0] * target[0]))
      np.testing.assert_allclose(accepted["naive"], naive, atol=1e-6)
    if k == 1 or warp == "greedy":
      token = expected["rejection"]
      np.testing.assert_allclose(accepted["block"], token, atol=1e-6)


def test_siblings_help_in_the_order_of_the_literature():
  draft, target = distributions(4, 1, seed=7)
  accepted = [
    check(RULES["rejection"], parents, kind, draft, target).accepted
    for parents, kind in [
      (CHAINS[1], "none"), (PAIR, "iid"), (PAIR, "without_replacement"),
      (TRIPLE, "without_replacement"),
    ]
  ]  # fmt: skip
  assert accepted == sorted(accepted)
  assert accepted[-1] > accepted[0] + 0.05


def test_used_up_support_is_uniform_over_the_unseen():
  third = enumeration.without(np.array([0.4, 0.6, 0.0, 0.0]), [0, 1])
  np.testing.assert_array_equal(third, [0, 0, 0.5, 0.5])
  draft, target = flat([0.4, 0.6, 0, 0], 1), flat([0.1, 0.2, 0.3, 0.4], 2)
  pair, triple = (
    check(RULES["rejection"], tree, "without_replacement", draft, target)
    for tree in (PAIR, TRIPLE)
  )
  assert triple.accepted > pair.accepted + 0.1  # the third is worth its place


@pytest.mark.parametrize(
  "rule, shape, kind",
  [
    ("rejection", "chain", "none"),
    ("block", "chain", "none"),
    ("rejection", "tree", "without_replacement"),
    ("rejection", "chains", "iid"),
    ("kseq", "chains", "iid"),
    ("relaxed", "tree", "deterministic"),
  ],
)
def test_prefix_acceptance_is_that_of_the_enumeration(rule, shape, kind):
  depth = depth_of(shape)
  draft, target = distributions(V, depth)
  rule = acceptance.relaxed(2, 0.5) if rule == "relaxed" else RULES[rule]
  drafts = drafts_of(shape, kind, draft)
  outcome = enumeration.emitted(rule, drafts, target)
  _, accept_prob, _ = enumeration.evaluated(rule, drafts, target)
  count = jnp.full((len(accept_prob),), drafts.tokens.shape[1])
  prefix_acceptance = np.asarray(
    TRAVERSALS[rule.traversal].prefix_acceptance(
      Draft(
        jnp.asarray(drafts.tokens), jnp.asarray(drafts.parents), None, count
      ),
      jnp.asarray(accept_prob, jnp.float32),
      depth,
    )
  )
  assert np.all(np.diff(prefix_acceptance, axis=1) <= 1e-6)
  expected = float(np.sum(drafts.weight[:, None] * prefix_acceptance))
  np.testing.assert_allclose(expected, outcome.accepted, rtol=1e-5)


def test_accept_prob_of_coupled_is_its_closed_form():
  draft, target = distributions(4, 1, seed=4)
  q, p = draft[0], target[0]
  closed = [
    1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(4)) for x in range(4)
  ]

  def accept_prob(tokens, parents, drawn=True):
    size = len(parents)
    facing, log_probs = (
      jnp.asarray(enumeration.log(np.tile(x, (size, 1)))) for x in (p, q)
    )
    probabilities = acceptance.coupled().accept_prob(
      Draft(
        jnp.array(tokens),
        np.array(parents),
        log_probs if drawn else None,
        jnp.array(size),
      ),
      facing,
    )
    return np.asarray(probabilities)[1:]

  drawn = [accept_prob([0, x], [-1, 0])[0] for x in range(4)]
  np.testing.assert_allclose(drawn * q, closed, rtol=1e-5)
  assert np.all(np.isnan(accept_prob([0, 1, 2], PAIR)))
  np.testing.assert_allclose(
    accept_prob([0, 3, 1, 2], TRIPLE, drawn=False),
    [p[3], p[1] / (1 - p[3]), p[2] / (1 - p[3] - p[1])],
    rtol=1e-4,
  )


# Planted bugs of a drafter: its tokens were not drawn from what it claims.


def test_b02_raw_distribution_claimed_for_a_filtered_draw_is_caught():
  logits = distribution.random_logits(3, 4, 1)
  draft, raw = distribution.warp(logits, top_k=2), distribution.warp(logits)
  target = distribution.warp(distribution.random_logits(103, 4, 2), top_k=2)
  for parents, kind in ((CHAINS[1], "none"), (PAIR, "iid")):
    assert planted(parents, kind, draft, target, claimed=draft) < EXACT
    assert planted(parents, kind, draft, target, claimed=raw) > PLANTED


def test_b01_greedy_draft_that_claims_a_softmax_is_caught():
  draft, target = distributions(4, 2, seed=5)
  logits = distribution.random_logits(5, 4, 2)
  greedy = distribution.warp(logits, temperature=0.0)
  assert planted(CHAINS[2], "none", greedy, target, claimed=draft) > PLANTED


def test_siblings_of_the_wrong_kind_are_caught():
  draft, target = distributions(4, 1, seed=6)
  error = planted(PAIR, "without_replacement", draft, target, claimed=draft)
  assert error > PLANTED


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_low_confidence_token_that_is_dropped_is_caught(rule, dropped):
  """Drafting stops at an unlikely token; it must still be verified."""
  draft, target = distributions(4, 3, seed=6)
  drafts = enumeration.drafts("none", CHAINS[3], draft)
  probs = np.take_along_axis(drafts.drawn, drafts.tokens[..., None], -1)[..., 0]
  unlikely = probs[:, 1:] < 0.3
  stop = np.where(unlikely.any(1), unlikely.argmax(1) + (not dropped), 3)
  outcomes = [
    enumeration.emitted(
      RULES[rule],
      enumeration.Drafts(*(x[stop == count] for x in drafts)),
      target,
      count=int(count) + 1,
    )
    for count in np.unique(stop)
  ]
  joint = np.zeros(())
  for d, level in enumerate(target):
    parts = [x.emitted[d] for x in outcomes if len(x.emitted) > d]
    joint = joint[..., None] * level + sum(parts)
  error = np.abs(joint - enumeration.text_distribution(target)).max()
  assert error > PLANTED if dropped else error < EXACT


@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
@pytest.mark.parametrize("ranked", [False, True])
def test_samples_that_are_ranked_again_are_caught(kind, ranked):
  """Of three draws the two likeliest are kept, in that order."""
  draft, target = distributions(4, 1, seed=6)
  drafts = enumeration.drafts(kind, TRIPLE, draft, joined=False)
  order = np.broadcast_to(np.arange(2), (len(drafts.tokens), 2))
  if ranked:
    probs = draft[0][drafts.tokens[:, 1:]]
    order = np.argsort(-probs, axis=1, kind="stable")[:, :2]
  tokens = np.take_along_axis(
    drafts.tokens, np.pad(order + 1, [(0, 0), (1, 0)]), 1
  )
  drawn = [  # what honest draws of these would have come from
    [np.full(4, 0.25)]
    + [
      enumeration.distribution_of_node(kind, PAIR, node, row, draft)
      for node in (1, 2)
    ]
    for row in tokens
  ]
  parents = np.broadcast_to(np.array(PAIR, np.int32), tokens.shape)
  outcome = enumeration.emitted(
    RULES["rejection"],
    enumeration.Drafts(drafts.weight, tokens, parents, np.array(drawn)),
    target,
  )
  error = distribution.error(outcome, target)
  assert error > PLANTED if ranked else error < EXACT


# Planted bugs of a rule.


@pytest.mark.parametrize(
  "parents, kind", [(CHAINS[1], "none")] + [(PAIR, kind) for kind in SIBLINGS]
)
def test_b14_sampled_children_whose_distribution_is_ignored(parents, kind):
  """Point masses are right whatever chose them, and fewer are accepted.

  What is wrong is to accept by one distribution and to refuse by another.
  """
  draft, target = distributions(4, 1, seed=6)
  rule = RULES["rejection"]
  ignored = check(rule, parents, kind, draft, target, claimed=None)
  if kind == "deterministic":
    return
  honest = check(rule, parents, kind, draft, target)
  assert ignored.accepted < honest.accepted - 0.01

  def ignoring(half):
    return lambda draft, *args: half(draft._replace(log_probs=None), *args)

  for name in ("accept_prob", "residual"):
    wrong = rule._replace(**{name: ignoring(getattr(rule, name))})
    assert planted(parents, kind, draft, target, wrong) > PLANTED


def softmaxed_residual(draft, target, node):
  """Of a chain; after its last node nothing was refused."""
  exact = jnp.exp(target[node])
  drawn = jnp.exp(draft.log_probs[jnp.minimum(node + 1, len(target) - 1)])
  refused = jax.nn.softmax(jnp.maximum(exact - drawn, 0.0))
  return jnp.where(node + 1 < draft.count, refused, exact)


def same_for_every_sibling(draft, target):
  """The residual is not carried to the second sibling."""
  return ratio(draft, prob_of_tokens(draft, target))


@pytest.mark.parametrize(
  "changes, parents, kind",
  [
    ({"residual": softmaxed_residual}, CHAINS[1], "none"),
    *(({"accept_prob": same_for_every_sibling}, PAIR, x) for x in SIBLINGS),
    # Refused children stay in the next distribution.
    ({"residual": lambda _, target, n: jnp.exp(target[n])}, CHAINS[1], "none"),
    (RULES["greedy"]._asdict(), CHAINS[1], "none"),  # above temperature 0
  ],
)
def test_b03_rejection_with_a_planted_bug_is_caught(changes, parents, kind):
  draft, target = distributions(4, 1, seed=6)
  wrong = RULES["rejection"]._replace(**changes)
  assert planted(parents, kind, draft, target, wrong) > PLANTED
