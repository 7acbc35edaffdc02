"""FLy: what is overruled, against every pattern of native decisions."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from distribution import CHAINS, EXACT, PLANTED, distributions
from specdec import acceptance
from specdec.testing import enumeration
from specdec.types import Draft

REJECTION = acceptance.rejection()


def top_entropy(probs, top=3) -> float:
  likeliest = np.sort(probs)[::-1][:top]
  likeliest = likeliest[likeliest > 0]
  return float(-np.sum(likeliest * np.log(likeliest)))


def last_accepted(native, unsure, window) -> int:
  """The state machine, of one pattern: native, unsure [k] bool."""
  k = len(native)
  accepted = 0
  while accepted < k:
    here = accepted
    if native[here]:
      accepted += 1
      continue
    ahead = native[here + 1 : here + 1 + window]
    if not (unsure[here] and len(ahead) == window and all(ahead)):
      return accepted
    accepted += 1 + window
  return accepted


def exact_ends(rule, drafts, target, window, threshold) -> np.ndarray:
  """[M, N] probability that each node is the last one accepted."""
  texts, native, _ = enumeration.evaluated(REJECTION, drafts, target)
  ends = np.zeros_like(native)
  k = native.shape[1] - 1
  for row in range(len(native)):
    unsure = []
    for node in range(1, k + 1):
      *past, token = texts[row][node]
      facing = target[node - 1][tuple(past)]
      unsure.append(top_entropy(facing) >= threshold and facing[token] > 0)
    for pattern in itertools.product((True, False), repeat=k):
      prob = np.where(pattern, native[row, 1:], 1 - native[row, 1:]).prod()
      ends[row, last_accepted(pattern, unsure, window)] += prob
  return ends


@pytest.mark.parametrize("kind", ["none", "deterministic"])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.8, 2.0])
def test_it_is_the_state_machine_of_all_native_decisions(
  kind, window, threshold
):
  k, rule = 4, acceptance.fly(window, threshold)
  parents = [-1, *range(k)]
  for warp in ("baseline", "all"):
    draft, target = distributions(3, k, warp, seed=window)
    drafts = enumeration.drafts(kind, parents, draft)
    _, accept_prob, residual = enumeration.evaluated(rule, drafts, target)
    ends = enumeration.TRAVERSALS["last_success"](
      drafts.tokens, drafts.parents, accept_prob
    )
    expected = exact_ends(rule, drafts, target, window, threshold)
    np.testing.assert_allclose(ends, expected, atol=EXACT)
    strict = enumeration.evaluated(REJECTION, drafts, target).residual
    np.testing.assert_array_equal(residual, strict)


def test_it_keeps_more_than_rejection_and_loses_the_distribution():
  draft, target = distributions(3, 3)
  strict, loose, short = (
    distribution.emitted(rule, CHAINS[3], "none", draft, target)
    for rule in (REJECTION, acceptance.fly(), acceptance.fly(window=10**9))
  )
  assert loose.accepted > strict.accepted + 0.01
  assert distribution.error(loose, target) > PLANTED
  # A window that never fits overrules nothing; nor does a sure target.
  np.testing.assert_allclose(short.accepted, strict.accepted, atol=1e-6)
  assert distribution.error(short, target) < EXACT
  draft, target = distributions(3, 3, "greedy")
  outcome = distribution.emitted(
    acceptance.fly(1), CHAINS[3], "none", draft, target
  )
  assert distribution.error(outcome, target) < EXACT


def test_nodes_that_are_not_in_use_are_no_window():
  draft, target = distributions(3, 3)
  rule = acceptance.fly(window=1)
  for count in (1, 2, 3):
    drafts = enumeration.drafts("none", CHAINS[3], draft, count=count)
    outcome = enumeration.emitted(rule, drafts, target, count=count)
    chain = CHAINS[3][:count]
    expected = distribution.emitted(rule, chain, "none", draft, target)
    np.testing.assert_allclose(outcome.accepted, expected.accepted, atol=1e-6)


@pytest.mark.parametrize(
  "probs, unsure", [([0.9, 0.05, 0.05], 1), ([0.97, 0.02, 0.01], 0)]
)
def test_the_threshold_is_in_nats(probs, unsure):
  """0.9 and twice 0.05 have 0.395 nats, the other 0.154."""
  log_probs = jnp.log(jnp.array([probs] * 3))
  tokens = jnp.array([0, 2, 0])  # 2 is refused nearly always, 0 accepted
  drawn = jnp.log(jnp.array([[0.01, 0.01, 0.98], [0.9, 0.05, 0.05]]))
  drawn = jnp.concatenate([drawn[:1], drawn])
  draft = Draft(tokens, np.array([-1, 0, 1]), drawn, jnp.int32(3))
  accept = acceptance.fly(window=1).accept_prob(draft, log_probs)
  native = probs[2] / 0.98
  np.testing.assert_allclose(accept[2], 1 if unsure else native, rtol=1e-5)


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    ({"window": 0}, "window = 0; it must be a whole number"),
    ({"window": 1.5}, "window = 1.5"),
    ({"top": 0}, "top = 0"),
    ({"top": 65}, "top = 65; it must be in 1..64"),
    ({"threshold": -1}, "threshold = -1; it must be >= 0"),
    ({"threshold": float("nan")}, "threshold = nan"),
  ],
)
def test_numbers_out_of_range_are_refused(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    acceptance.fly(**arguments)


def test_numbers_beyond_32_bits():
  """No draft is as long, and no vocabulary as large."""
  draft, target = distributions(3, 2)
  drafts = enumeration.drafts("none", [-1, 0, 1], draft)
  for huge, same in (
    (acceptance.fly(window=10**12, threshold=0.0), REJECTION),
    (acceptance.relaxed(10**12, 1.0), acceptance.relaxed(3, 1.0)),
  ):
    ours, theirs = (
      enumeration.emitted(rule, drafts, target) for rule in (huge, same)
    )
    np.testing.assert_allclose(ours.joint, theirs.joint, atol=EXACT)
