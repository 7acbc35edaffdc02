"""Every rule's output distribution is the target's: exact, over all drafts."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from specdec import acceptance

rejection_file = sys.modules["specdec.acceptance.rejection"]

EXACT = 1e-6
PLANTED = 1e-3

CHAINS = {k: [-1, *range(k)] for k in (1, 2, 3)}
PAIR = [-1, 0, 0]
TRIPLE = [-1, 0, 0, 0]
DEEP = [-1, 0, 0, 1, 1, 2]

WARPS = {
  "baseline": {},
  "cool": {"temperature": 0.7},
  "greedy": {"temperature": 0.0},
  "top_k": {"top_k": 2},
  "top_p": {"top_p": 0.6},
  "both": {"temperature": 0.7, "top_k": 3, "top_p": 0.8},
}
SIBLINGS = ("iid", "without_replacement", "deterministic")


def distributions(vocab_size, length, warp, seed=0):
  """(draft, target) distributions of random texts, warped alike."""
  options = WARPS[warp]
  draft = distribution.random_logits(seed, vocab_size, length)
  target = distribution.random_logits(seed + 100, vocab_size, length + 1)
  return distribution.warp(draft, **options), distribution.warp(
    target, **options
  )


def check(rule, parents, kind, draft, target, **options):
  outcome = distribution.emitted(rule, parents, kind, draft, target, **options)
  np.testing.assert_allclose(outcome.joint.sum(), 1.0, atol=EXACT)
  assert distribution.error(outcome, target) < EXACT
  return outcome


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", ["none", "deterministic"])
@pytest.mark.parametrize("k", CHAINS)
def test_rejection_of_a_chain(k, kind, warp):
  draft, target = distributions(4, k, warp, seed=k)
  outcome = check(acceptance.rejection(), CHAINS[k], kind, draft, target)
  if kind == "none":
    expected = distribution.chain_acceptance(draft, target)
    np.testing.assert_allclose(outcome.accepted, expected, atol=1e-6)


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", SIBLINGS)
@pytest.mark.parametrize("parents", [PAIR, TRIPLE], ids=["pair", "triple"])
def test_rejection_of_siblings(parents, kind, warp):
  for seed in range(3):
    draft, target = distributions(4, 1, warp, seed)
    check(acceptance.rejection(), parents, kind, draft, target)


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", SIBLINGS)
def test_rejection_of_a_tree(kind, warp):
  draft, target = distributions(3, 2, warp)
  check(acceptance.rejection(), DEEP, kind, draft, target)


@pytest.mark.parametrize("kind", SIBLINGS)
def test_rejection_of_a_tree_known_only_at_run_time(kind):
  draft, target = distributions(3, 2, "baseline")
  rule = acceptance.rejection()
  static = check(rule, DEEP, kind, draft, target)
  traced = check(rule, DEEP, kind, draft, target, traced=True)
  np.testing.assert_allclose(traced.accepted, static.accepted, atol=1e-6)


@pytest.mark.parametrize(
  "parents, kind",
  [(CHAINS[2], "none"), (CHAINS[2], "deterministic")]
  + [(tree, kind) for tree in (PAIR, DEEP) for kind in SIBLINGS],
)
def test_greedy_at_temperature_zero(parents, kind):
  depth = distribution.depths(parents).max()
  for seed in range(3):
    draft, target = distributions(3, depth, "greedy", seed)
    check(acceptance.greedy(), parents, kind, draft, target)


@pytest.mark.parametrize("rubbish", [0.5, -np.inf, np.nan])
@pytest.mark.parametrize(
  "parents, kind",
  [(CHAINS[3], "none"), (TRIPLE, "iid"), (DEEP, "without_replacement")],
)
def test_nodes_past_count_never_matter(parents, kind, rubbish):
  draft, target = distributions(
    3, distribution.depths(parents).max(), "baseline"
  )
  rule = acceptance.rejection()
  for count in range(1, len(parents)):
    outcome = check(
      rule, parents, kind, draft, target, count=count, rubbish=rubbish
    )
    short = distribution.emitted(rule, parents[:count], kind, draft, target)
    np.testing.assert_allclose(outcome.accepted, short.accepted, atol=1e-6)


def test_siblings_help_in_the_order_of_the_literature():
  draft, target = distributions(4, 1, "baseline", seed=7)
  rule = acceptance.rejection()
  accepted = [
    check(rule, parents, kind, draft, target).accepted
    for parents, kind in [
      (CHAINS[1], "none"), (PAIR, "iid"), (PAIR, "without_replacement"),
      (TRIPLE, "without_replacement"),
    ]
  ]  # fmt: skip
  assert accepted == sorted(accepted)
  assert accepted[-1] > accepted[0] + 0.05


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize(
  "parents, kind", [(CHAINS[3], "none"), (DEEP, "iid"), (DEEP, SIBLINGS[1])]
)
def test_b12_the_targets_own_draft_is_accepted_whole(parents, kind, warp):
  depth = distribution.depths(parents).max()
  _, target = distributions(3, depth, warp)
  outcome = check(acceptance.rejection(), parents, kind, target[:depth], target)
  np.testing.assert_allclose(outcome.accepted, depth, atol=1e-6)


def flat(*rows):
  """A distribution over texts in which the past does not matter, one row a
  token.
  """
  levels = []
  for d, row in enumerate(rows):
    row = np.array(row, float)
    levels.append(np.broadcast_to(row, (len(row),) * d + row.shape))
  return levels


@pytest.mark.parametrize(
  "draft, target",
  [
    ([0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7]),  # disjoint supports
    ([1, 0, 0, 0], [0, 0, 1, 0]),  # one-hot, apart
    ([0, 0, 1, 0], [0, 0, 1, 0]),  # one-hot, equal: 0/0 in the residual
    ([0.25, 0.25, 0.25, 0.25], [0, 1, 0, 0]),  # one-hot target
    ([0, 1, 0, 0], [0.1, 0.2, 0.3, 0.4]),  # one-hot draft
    ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),  # no residual
    ([0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]),  # equal, with zeros
    ([0.1, 0.9, 0, 0], [0.5, 0.5, 0, 0]),  # used up by two siblings
    ([1, 0, 0, 0], [0.4, 0.3, 0.2, 0.1]),  # used up by the first of them
  ],
)
@pytest.mark.parametrize("parents", [CHAINS[1], PAIR, TRIPLE, DEEP])
def test_b26_degenerate_distributions(parents, draft, target):
  depth = distribution.depths(parents).max()
  rule = acceptance.rejection()
  target = flat(*[target] * (depth + 1))
  kinds = SIBLINGS if max(np.bincount(np.array(parents[1:]))) > 1 else ["none"]
  for kind in kinds:
    outcome = check(rule, parents, kind, flat(*[draft] * depth), target)
    assert np.isfinite(outcome.accepted)


def test_used_up_support_is_uniform_over_the_unseen():
  distribution_of_third = distribution.without(
    np.array([0.4, 0.6, 0.0, 0.0]), [0, 1]
  )
  np.testing.assert_array_equal(distribution_of_third, [0, 0, 0.5, 0.5])
  draft, target = flat([0.4, 0.6, 0, 0]), flat(*[[0.1, 0.2, 0.3, 0.4]] * 2)
  rule = acceptance.rejection()
  kept = check(rule, TRIPLE, "without_replacement", draft, target).accepted
  pair = check(rule, PAIR, "without_replacement", draft, target).accepted
  assert kept > pair + 0.1  # the third sibling is worth its place


def test_b08_keep_is_exactly_zero_and_one():
  draft, target = flat([0.5, 0.5, 0, 0]), flat(*[[0, 0.5, 0.25, 0.25]] * 2)
  node = jnp.array([[0, 0], [0, 1]])
  for tokens, expected in zip(node, (0.0, 1.0)):
    accept_prob = acceptance.rejection().accept_prob(
      distribution.Draft(
        tokens,
        np.array(CHAINS[1]),
        distribution.log(np.stack([draft[0]] * 2)),
        2,
      ),
      distribution.log(np.stack([target[0]] * 2)),
    )
    assert float(accept_prob[1]) == expected


# Planted bugs: the check must turn red.


def planted(parents, kind, draft, target, rule=None, **options):
  rule = rule or acceptance.rejection()
  wrong = distribution.error(
    distribution.emitted(rule, parents, kind, draft, target, **options), target
  )
  print(f"error {wrong:.4f}")
  return wrong


def test_b02_raw_distribution_said_for_a_filtered_draw_is_caught():
  logits = distribution.random_logits(3, 4, 1)
  draft = distribution.warp(logits, top_k=2)
  target = distribution.warp(distribution.random_logits(103, 4, 2), top_k=2)
  for parents, kind in ((CHAINS[1], "none"), (PAIR, "iid")):
    assert planted(parents, kind, draft, target, said=draft) < EXACT
    raw = distribution.warp(logits)
    assert planted(parents, kind, draft, target, said=raw) > PLANTED


def test_b01_greedy_draft_that_says_softmax_is_caught():
  draft, target = distributions(4, 2, "baseline", seed=5)
  tokens_of = distribution.warp(
    distribution.random_logits(5, 4, 2), temperature=0.0
  )
  assert planted(CHAINS[2], "none", tokens_of, target, said=draft) > PLANTED


def half_silent(rule, silent_accept_prob):
  """One half of the rule takes the draft for a point mass, one does not."""

  def silent(half):
    return lambda draft, *args: half(draft._replace(log_probs=None), *args)

  if silent_accept_prob:
    return rule._replace(accept_prob=silent(rule.accept_prob))
  return rule._replace(residual=silent(rule.residual))


@pytest.mark.parametrize(
  "parents, kind", [(CHAINS[1], "none")] + [(PAIR, kind) for kind in SIBLINGS]
)
def test_b14_sampled_children_that_say_nothing(parents, kind):
  """Point masses are right whatever chose them, and keep fewer draft tokens.

  What is wrong is to keep by one distribution and to refuse by another.
  """
  draft, target = distributions(4, 1, "baseline", seed=6)
  rule = acceptance.rejection()
  silent = check(rule, parents, kind, draft, target, said=None)
  if kind == "deterministic":
    return
  said = check(rule, parents, kind, draft, target)
  assert silent.accepted < said.accepted - 0.01
  for silent_accept_prob in (True, False):
    wrong = half_silent(rule, silent_accept_prob)
    assert planted(parents, kind, draft, target, wrong) > PLANTED


def test_siblings_of_the_wrong_kind_are_caught():
  draft, target = distributions(4, 1, "baseline", seed=6)
  wrong = planted(PAIR, "without_replacement", draft, target, said=draft)
  assert wrong > PLANTED


def test_b03_softmaxed_residual_is_caught(monkeypatch):
  def refuse(target, drawn):
    return jax.nn.softmax(jnp.maximum(target - drawn, 0.0), axis=-1)

  monkeypatch.setattr(rejection_file, "remainder", refuse)
  rule = acceptance.rejection()
  rule = rule._replace(
    accept_prob=lambda *args: rejection_file._accept_prob(*args),
    residual=lambda *args: rejection_file._residual(*args),
  )
  draft, target = distributions(4, 1, "baseline", seed=6)
  assert planted(CHAINS[1], "none", draft, target, rule) > PLANTED
  assert planted(PAIR, "iid", draft, target, rule) > PLANTED


@pytest.mark.parametrize("kind", SIBLINGS)
def test_residual_not_carried_to_the_second_sibling_is_caught(kind):
  honest = acceptance.rejection()

  def accept_prob(draft, target_log_probs):
    above = jnp.maximum(jnp.asarray(draft.parents), 0)
    facing = jnp.exp(target_log_probs[above, draft.tokens])
    if draft.log_probs is None:
      return facing
    nodes = jnp.arange(len(above))
    drawn = jnp.exp(draft.log_probs[nodes, draft.tokens])
    return jnp.minimum(1.0, facing / drawn)

  draft, target = distributions(4, 1, "baseline", seed=6)
  assert planted(PAIR, kind, draft, target) < EXACT
  rule = honest._replace(accept_prob=accept_prob)
  assert planted(PAIR, kind, draft, target, rule) > PLANTED


def test_refused_children_missing_from_the_next_distribution_are_caught():
  rule = acceptance.rejection()._replace(
    residual=lambda draft, target, node: jnp.exp(target[node])
  )
  draft, target = distributions(4, 1, "baseline", seed=6)
  assert planted(CHAINS[1], "none", draft, target, rule) > PLANTED


def test_greedy_above_temperature_zero_is_caught():
  draft, target = distributions(4, 1, "baseline", seed=6)
  wrong = planted(CHAINS[1], "none", draft, target, acceptance.greedy())
  assert wrong > PLANTED
