"""Lossy rules: what they keep, by hand; how far they stray, by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distribution
from distribution import CHAINS, DEEP, EXACT, WARPS, distributions
from specdec import acceptance, decode, sampling
from specdec.testing import table_model
from specdec.types import Draft, DraftSpec, Params


def first_token(outcome) -> np.ndarray:
  """[V] distribution of the first emitted token."""
  joint = outcome.joint
  return joint.sum(axis=tuple(range(1, joint.ndim)))


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("kind", ["none", "deterministic"])
def test_lenience_keeps_its_bound(kind, share, warp):
  rule = acceptance.lenience(share)
  assert rule.lossless == (share == 1)
  for seed in range(2):
    draft, target = distributions(4, 2, warp, seed)
    outcome = distribution.emitted(rule, CHAINS[2], kind, draft, target)
    assert np.all(first_token(outcome) <= target[0] / share + EXACT)
    strict = distribution.emitted(
      acceptance.rejection(), CHAINS[2], kind, draft, target
    )
    assert outcome.accepted >= strict.accepted - 1e-6
    if share == 1:
      assert distribution.error(outcome, target) < EXACT
      np.testing.assert_allclose(outcome.accepted, strict.accepted, atol=1e-6)


def test_lenience_is_lossy_and_says_by_how_much():
  draft, target = distributions(4, 1, seed=6)
  rule = acceptance.lenience(0.3)
  outcome = distribution.emitted(rule, CHAINS[1], "none", draft, target)
  assert distribution.error(outcome, target) > 0.01
  assert "3.33" in rule.caveat
  # In closed form: sum min(p / l, q).
  expected = np.minimum(target[0] / 0.3, draft[0]).sum()
  np.testing.assert_allclose(outcome.accepted, expected, atol=1e-6)


DISTRIBUTION = np.array([0.5, 0.3, 0.15, 0.05])


def kept(rule, facing) -> list[float]:
  """Whether each token is kept as the only child of a root facing `facing`."""
  log_distribution = jnp.log(jnp.asarray(np.stack([facing] * 2), jnp.float32))
  return [
    float(
      rule.accept_prob(
        Draft(jnp.array([0, token]), np.array([-1, 0]), None, 2),
        log_distribution,
      )[1]
    )
    for token in range(len(facing))
  ]


@pytest.mark.parametrize(
  "rule, accepted",
  [  # H = 1.142 nats, exp(-H) = 0.319
    (acceptance.typical(0.09, 0.3), 3),  # of more than 0.09
    (acceptance.typical(0.2, 0.9), 2),  # 0.2
    (acceptance.typical(0.9, 0.5), 2),  # 0.16
    (acceptance.typical(1.0, 1.0), 1),  # 0.319
    # The two numbers are not interchangeable, as in Medusa's code.
    (acceptance.typical(0.3, 0.09), 4),
    (acceptance.relaxed(1, 1.0), 1),
    (acceptance.relaxed(3, 1.0), 3),
    (acceptance.relaxed(3, 0.2), 2),
    (acceptance.relaxed(4, 0.0), 1),
  ],
)
def test_the_likeliest_tokens_are_accepted(rule, accepted):
  assert kept(rule, DISTRIBUTION) == [1] * accepted + [0] * (4 - accepted)


def test_typical_of_a_flat_distribution_accepts_all():
  assert kept(acceptance.typical(0.09, 0.3), np.full(20, 0.05)) == [1.0] * 20


@pytest.mark.parametrize(
  "rule", [acceptance.typical(), acceptance.relaxed(2, 0.3)]
)
@pytest.mark.parametrize("parents, kind", [(CHAINS[2], "none"), (DEEP, "iid")])
def test_greedy_at_temperature_zero_and_lossy_above(rule, parents, kind):
  depth = distribution.max_depth(parents)
  for warp in ("greedy", "baseline"):
    draft, target = distributions(3, depth, warp, seed=1)
    outcome = distribution.emitted(rule, parents, kind, draft, target)
    error = distribution.error(outcome, target)
    assert error < EXACT if warp == "greedy" else error > 1e-3


def test_the_loop_traversal_to_the_longest_path():
  """Nodes 1 and 2 are kept, and only below 2 goes it on: 0, 2, 5."""
  parents = np.array([-1, 0, 0, 1, 1, 2], np.int32)
  good = jnp.array([False, True, True, False, False, True])
  rule = acceptance.relaxed(1, 0.0)._replace(
    accept_prob=lambda draft, log_distribution: good.astype(jnp.float32)
  )
  size = 7

  def propose(params, draft_state, context):
    pending = context.pending
    draft_tokens = jnp.broadcast_to(jnp.arange(1, 6)[None], (len(pending), 5))
    tokens = jnp.concatenate([pending, draft_tokens], axis=1)
    count = jnp.full_like(context.length, 6)
    return Draft(tokens, None, None, count), draft_state

  baseline = decode.NO_DRAFTER
  spec = DraftSpec.of(parents, siblings="deterministic")
  params = Params(table_model.init_params(jax.random.key(0), size))
  state = decode.generate(
    table_model.model(size),
    baseline._replace(spec=spec, propose=propose),
    rule,
    params,
    jnp.array([[3], [4]]),
    jnp.array([1, 1]),
    jax.random.key(0),
    max_length=7,
    sampling=sampling.settings(2),
  )
  np.testing.assert_array_equal(state.tokens[:, 1:3], [[2, 5]] * 2)
  np.testing.assert_array_equal(state.tokens[:, 4:6], [[2, 5]] * 2)
  np.testing.assert_array_equal(state.stats.rounds, [2, 2])


@pytest.mark.parametrize(
  ("build", "sentence"),
  [
    (lambda: acceptance.lenience(0), "share = 0; it must be in"),
    (lambda: acceptance.lenience(1.5), "share = 1.5"),
    (lambda: acceptance.typical(epsilon=2), "epsilon = 2"),
    (lambda: acceptance.typical(delta=-1), "delta = -1"),
    (lambda: acceptance.relaxed(0, 0.1), "top = 0"),
    (lambda: acceptance.relaxed(2, 1.1), "margin = 1.1"),
    (lambda: acceptance.synthetic([0.5, -0.1]), r"outside \[0, 1\]"),
    (lambda: acceptance.synthetic([float("nan")]), r"outside \[0, 1\]"),
    (lambda: acceptance.synthetic([]), "give at least one"),
  ],
)
def test_numbers_out_of_range_are_refused(build, sentence):
  with pytest.raises(ValueError, match=sentence):
    build()
