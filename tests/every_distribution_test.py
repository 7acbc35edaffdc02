"""Every rule with every shape of draft: exact distributions, round after round.

Single rounds under distributions that break things; then whole generations,
whose rounds begin wherever the one before ended; then drafts that no rule can
save.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from acceptance_distribution_test import (
  CHAINS,
  DEEP,
  EXACT,
  PLANTED,
  TRIPLE,
  distributions,
  flat,
)
from specdec import acceptance, draft_shape, draft_tree, sampling
from specdec.testing import enumeration
from specdec.traversal import TRAVERSALS
from specdec.types import Context, Draft

V = 3
RULES = {
  "rejection": acceptance.rejection(),
  "kseq": acceptance.kseq(),
  "block": acceptance.block(),
  "naive": acceptance.naive(),
  "greedy": acceptance.greedy(),
}
CHAIN_KINDS = ("none", "deterministic")
TREE_KINDS = ("iid", "without_replacement", "deterministic")
SHAPES = {
  "chain": (CHAINS[3], CHAIN_KINDS),
  "siblings": (TRIPLE, TREE_KINDS),
  "tree": (DEEP, TREE_KINDS),
  "chains": (draft_tree.parallel(2, 2), TREE_KINDS),
  "shared": (draft_tree.parallel(2, 3, 1), TREE_KINDS),
  "dynamic": (None, ("dynamic",)),
}
ONE_HOT = flat(*[[0, 1, 0]] * 4)
APART = flat(*[[0.3, 0.7, 0]] * 4), flat(*[[0, 0, 1]] * 4)
CASES = {
  "baseline": distributions(V, 3, "baseline"),
  "greedy": distributions(V, 3, "greedy"),
  "top_p": distributions(V, 3, "top_p"),
  "one-hot draft": (ONE_HOT[:3], distributions(V, 3, "baseline")[1]),
  "one-hot target": (distributions(V, 3, "baseline")[0], ONE_HOT),
  "apart": APART,
}


def fits(rule, shape: str, kind: str) -> bool:
  siblings = "deterministic" if kind == "dynamic" else kind
  chain = shape == "chain"
  return siblings in rule.siblings and (chain or not rule.chains_only)


PAIRS = [
  (rule, shape, kind)
  for rule, (shape, (_, kinds)) in itertools.product(RULES, SHAPES.items())
  for kind in kinds
  if fits(RULES[rule], shape, kind)
]


def drafts_of(shape, kind, draft_distributions, depth=3) -> enumeration.Drafts:
  """All drafts; the dynamic tree by its own code, one for each text."""
  if kind != "dynamic":
    parents, _ = SHAPES[shape]
    return enumeration.drafts(kind, parents, draft_distributions)
  return dynamic_drafts(
    draft_shape.dynamic(2, min(depth, 3), 4), draft_distributions
  )


def dynamic_drafts(expansion, draft_distributions) -> enumeration.Drafts:
  """What an draft shape of point masses makes of these distributions."""
  pending = jnp.zeros((1, 1), jnp.int32)
  seen = [0]

  def run(carry, tokens, parents, first, need_logits):
    assert need_logits and first == len(seen)
    seen.extend(int(token) for token in tokens[0])
    shape = np.asarray(parents).reshape(-1)
    rows = []
    for node in range(first, len(seen)):
      text = tuple(seen[n] for n in enumeration.path_of(shape, node))
      rows.append(draft_distributions[len(text)][text])
    return carry, jnp.asarray(distribution.log(rows))[None]

  context = Context(
    pending, jnp.ones((1,), jnp.int32), sampling.settings(1, 1.0), None, None
  )
  root = jnp.asarray(distribution.log(draft_distributions[0]))[None]
  tree, _ = expansion.sample_tree(context, root, run, None)
  tokens, parents = (
    np.asarray(tree.draft.tokens),
    np.asarray(tree.draft.parents),
  )
  return enumeration.Drafts(np.ones(1), tokens, parents, None)


def depth_of(shape: str) -> int:
  parents = SHAPES[shape][0]
  return 3 if parents is None else distribution.depths(parents).max()


def one_round(rule, shape, kind, draft, target) -> enumeration.Outcome:
  """What a rule makes of all drafts of a shape, under distributions of any
  length.
  """
  depth = depth_of(shape)
  return enumeration.emitted(
    RULES[rule],
    drafts_of(shape, kind, draft[:depth]),
    target[: depth + 1],
    traced=kind == "dynamic",
  )


@pytest.mark.parametrize(
  "rule, shape, kind, case",
  [
    (*pair, case)
    for pair in PAIRS
    for case in (["greedy"] if pair[0] == "greedy" else CASES)
  ],
)
def test_a_round_leaves_the_targets_distribution(rule, shape, kind, case):
  draft, target = CASES[case]
  found = one_round(rule, shape, kind, draft, target)
  np.testing.assert_allclose(found.joint.sum(), 1.0, atol=EXACT)
  assert distribution.error(found, target) < EXACT


def keeps_all(rule, shape, kind, warp) -> bool:
  """Of a target's own draft tokens; point masses are its distribution at
  temperature 0 only, and a second child that has one draft token below it may
  be the one that is kept.
  """
  if rule not in ("rejection", "kseq", "block"):
    return False
  sampled = kind not in ("deterministic", "dynamic")
  return warp == "greedy" or (sampled and (shape, kind) != ("tree", "iid"))


@pytest.mark.parametrize(
  "rule, shape, kind, warp",
  [
    (*pair, warp)
    for pair in PAIRS
    for warp in ("baseline", "greedy", "top_p")
    if keeps_all(*pair, warp)
  ],
)
def test_the_targets_own_draft_tokens_are_all_kept(rule, shape, kind, warp):
  _, target = distributions(V, 3, warp)
  found = one_round(rule, shape, kind, target, target)
  np.testing.assert_allclose(found.accepted, depth_of(shape), atol=1e-5)


LENGTH = 3  # tokens of a whole generation


@pytest.mark.parametrize("rule, shape, kind", PAIRS)
def test_whole_generations_follow_the_targets_distribution(rule, shape, kind):
  """Rounds begin where the one before ended, whatever it kept."""
  warp = "greedy" if rule == "greedy" else "baseline"
  draft, target = distributions(V, LENGTH + 3, warp, seed=3)

  def after(text):
    ours, theirs = (enumeration.after(x, text) for x in (draft, target))
    return one_round(rule, shape, kind, ours, theirs)

  found = enumeration.generated(after, V, LENGTH)
  exact = enumeration.text_distribution(target[:LENGTH])
  np.testing.assert_allclose(found, exact, atol=EXACT)


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
def test_what_is_expected_of_a_draft_is_what_its_distribution_says(
  rule, shape, kind
):
  """walk.py's prefix_acceptance, against the enumeration."""
  depth = depth_of(shape)
  draft, target = distributions(V, depth, "baseline")
  chosen = acceptance.relaxed(2, 0.5) if rule == "relaxed" else RULES[rule]
  found = drafts_of(shape, kind, draft)
  outcome = enumeration.emitted(chosen, found, target)
  texts = [
    [tuple(row[enumeration.path_of(p, n)]) for n in range(len(p))]
    for row, p in zip(found.tokens, found.parents)
  ]
  facing = distribution.log([[target[len(t)][t] for t in row] for row in texts])
  said = None if found.drawn is None else distribution.log(found.drawn)
  count = jnp.int32(found.tokens.shape[1])
  accept_prob = jax.vmap(
    lambda t, p, s, f: chosen.accept_prob(Draft(t, p, s, count), f),
    (0, 0, None if said is None else 0, 0),
  )(found.tokens, found.parents, said, facing)
  whole = Draft(
    jnp.asarray(found.tokens),
    jnp.asarray(found.parents),
    None,
    jnp.full((len(accept_prob),), count),
  )
  prefix_acceptance = np.asarray(
    TRAVERSALS[chosen.traversal].prefix_acceptance(whole, accept_prob, depth)
  )
  assert np.all(np.diff(prefix_acceptance, axis=1) <= 1e-6)
  expected = float(np.sum(found.weight[:, None] * prefix_acceptance))
  np.testing.assert_allclose(expected, outcome.accepted, rtol=1e-5)


def test_what_coupled_keeps():
  """In closed form for a drawn draft token, and as it is for point masses."""
  draft, target = distributions(4, 1, "baseline", seed=4)
  q, p = draft[0], target[0]
  closed = [
    1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(4)) for x in range(4)
  ]
  accept_prob = acceptance.coupled().accept_prob

  def kept(tokens, parents, said):
    size = len(parents)
    facing = jnp.asarray(distribution.log(np.tile(p, (size, 1))))
    said = said and jnp.asarray(distribution.log(np.tile(q, (size, 1))))
    found = accept_prob(
      Draft(jnp.array(tokens), np.array(parents), said, jnp.array(size)), facing
    )
    return np.asarray(found)[1:]

  found = [kept([0, x], [-1, 0], True)[0] for x in range(4)]
  np.testing.assert_allclose(found * q, closed, rtol=1e-5)
  assert np.all(np.isnan(kept([0, 1, 2], TRIPLE[:3], True)))
  first, second, third = kept([0, 3, 1, 2], TRIPLE, None)
  np.testing.assert_allclose(first, p[3], rtol=1e-5)
  np.testing.assert_allclose(second, p[1] / (1 - p[3]), rtol=1e-5)
  np.testing.assert_allclose(third, p[2] / (1 - p[3] - p[1]), rtol=1e-4)


# Drafts that no rule can save: their tokens were not drawn from what is said.


def summed(parts, target):
  """Joint distribution of outcomes that together are all drafts."""
  depth = max(len(part.emitted) for part in parts)
  joint = 0.0
  for d in range(depth):
    level = sum(p.emitted[d] for p in parts if len(p.emitted) > d)
    joint = level if d == 0 else joint[..., None] * target[d] + level
  return joint


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_low_confidence_token_that_is_dropped_is_caught(rule, dropped):
  """Drafting stops at an unlikely token; it must still be verified."""
  draft, target = distributions(4, 3, "baseline", seed=6)
  found = enumeration.drafts("none", CHAINS[3], draft)
  own = np.take_along_axis(found.drawn, found.tokens[..., None], -1)[..., 0]
  unlikely = own[:, 1:] < 0.3
  stop = np.where(unlikely.any(1), unlikely.argmax(1) + (not dropped), 3)
  parts = []
  for count in np.unique(stop):
    group = enumeration.Drafts(*(x[stop == count] for x in found))
    parts.append(
      enumeration.emitted(RULES[rule], group, target, count=int(count) + 1)
    )
  wrong = np.abs(
    summed(parts, target) - distribution.text_distribution(target)
  ).max()
  print(f"error {wrong:.4f}")
  assert wrong > PLANTED if dropped else wrong < EXACT


@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
@pytest.mark.parametrize("ranked", [False, True])
def test_samples_that_are_ranked_again_are_caught(kind, ranked):
  """Of three draws the two likeliest are kept, in that order."""
  draft, target = distributions(4, 1, "baseline", seed=6)
  found = enumeration.drafts(kind, TRIPLE, draft, joined=False)
  own = draft[0][found.tokens[:, 1:]]
  order = (
    np.argsort(-own, axis=1, kind="stable")[:, :2]
    if ranked
    else (np.broadcast_to(np.arange(2), (len(own), 2)))
  )
  nodes = np.concatenate([np.zeros((len(own), 1), int), 1 + order], axis=1)
  tokens = np.take_along_axis(found.tokens, nodes, axis=1)
  parents = np.broadcast_to(np.array([-1, 0, 0], np.int32), tokens.shape)
  drawn = np.array(
    [
      [
        enumeration.distribution_of_node(kind, parents[0], node, row, draft)
        if node
        else np.full(4, 0.25)
        for node in range(3)
      ]
      for row in tokens
    ]
  )  # what honest draws of these would have come from
  outcome = enumeration.emitted(
    RULES["rejection"],
    enumeration.Drafts(found.weight, tokens, parents, drawn),
    target,
  )
  wrong = distribution.error(outcome, target)
  print(f"error {wrong:.4f}")
  assert wrong > PLANTED if ranked else wrong < EXACT


def test_only_deterministic_children_may_be_ranked():
  for kind in ("iid", "without_replacement"):
    with pytest.raises(ValueError, match="cannot be re-ranked"):
      draft_shape.dynamic(2, 2, 4, kind)
