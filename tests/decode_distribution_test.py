"""The real loop: whole texts follow their exact distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.noise import DRAFT, NEXT, Noise, pilot_key
from specdec.types import Drafter, Params
from text_statistics import (
  EXACT,
  GROUPS,
  MODEL,
  NEW,
  PARAMS,
  ROWS,
  SMALLEST_P,
  V,
  by_last_token,
  check,
  exact,
  p_value,
  sample,
  unfiltered,
)

TREE = np.array([-1, 0, 0, 1, 1, 2], np.int32)
SLOW = pytest.mark.slow

# A refusal says much about the noise of the two tokens that remain.
SKEWED = Params(
  by_last_token([0.02, 0.68, 0.3]), by_last_token([0.5, 0.49, 0.01])
)


def stopping() -> Drafter:
  """Of a tree, 1, 4 or 6 nodes, by the pending token."""
  honest = drafters.model(MODEL, shape=draft_shape.static(TREE))

  def propose(params, draft_state, context):
    draft, draft_state = honest.propose(params, draft_state, context)
    count = jnp.array([1, 4, 6])[draft.tokens[:, 0]]
    return draft._replace(count=count), draft_state

  spec = honest.spec._replace(widths=(1, 4, 6))
  return honest._replace(spec=spec, propose=propose)


def tree(kind: str) -> Drafter:
  return drafters.model(MODEL, shape=draft_shape.static(TREE, kind))


DRAFTERS = {
  "model": lambda: drafters.model(MODEL, 3),
  "lookup": lambda: drafters.lookup(3, ngram=2, min_ngram=1),
  "without_replacement": lambda: tree("without_replacement"),
  "deterministic": lambda: tree("deterministic"),
  "iid": lambda: tree("iid"),
  "chains": lambda: drafters.model(
    MODEL, shape=draft_shape.static(draft_tree.parallel(3, 2), "iid")
  ),
  "shared": lambda: drafters.model(
    MODEL, shape=draft_shape.static(draft_tree.parallel(2, 3, 1), "iid")
  ),
  "dynamic": lambda: drafters.model(MODEL, shape=draft_shape.dynamic(2, 3, 5)),
  "stopping": stopping,
}
CASES = [
  ("model", acceptance.rejection),
  ("lookup", acceptance.rejection),
  ("model", acceptance.block),
  ("without_replacement", acceptance.rejection),
  ("deterministic", acceptance.rejection),
  ("chains", acceptance.kseq),
  ("dynamic", acceptance.rejection),
  ("without_replacement", acceptance.coupled),
  ("without_replacement", acceptance.traversal),
  ("chains", acceptance.multipath),
]
MORE = [
  ("lookup", acceptance.block),
  ("shared", acceptance.kseq),
  ("shared", acceptance.traversal),
  ("dynamic", acceptance.traversal),
  ("stopping", acceptance.traversal),
  ("chains", acceptance.naive),
  ("iid", acceptance.rejection),
  ("stopping", acceptance.rejection),
  ("stopping", acceptance.coupled),
]


@pytest.mark.parametrize(
  "name, rule, seed",
  [(*case, 2) for case in CASES]
  + [pytest.param(*case, 2, marks=SLOW) for case in MORE]
  + [
    pytest.param(*case, seed, marks=SLOW)
    for case in CASES
    for seed in (11, 12, 13)
  ],
)
def test_texts_follow_the_targets_distribution(name, rule, seed):
  check(sample(DRAFTERS[name](), rule(), seed))


@pytest.mark.slow  # the coupled rule gives these very texts
def test_autoregressive_decoding_follows_the_distribution():
  check(sample(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, seed=3))


@pytest.mark.parametrize("honest", [True, False])
def test_a_k_chosen_by_a_pilot_run_is_lossless_only_with_a_key_of_its_own(
  honest,
):
  """--k=auto, a row at a time: as many tokens as a first round accepted."""
  group, rows = ((0,), 1.0, V, 1.0), 5 * ROWS
  prompt = jnp.zeros((rows, 1), jnp.int32)
  key = jax.random.key(21)

  def decoded(key, k):
    return decode.generate(
      MODEL,
      drafters.model(MODEL, k),
      acceptance.block(),
      SKEWED,
      prompt,
      jnp.ones((rows,), jnp.int32),
      key,
      max_length=1 + NEW,
      sampling=sampling.settings(rows, 1.0),
    )

  pilot = decoded(pilot_key(key) if honest else key, 3)
  accepted = pilot.stats.accepted[:, 1]  # rounds that accepted two tokens
  short, long = (decoded(key, k).tokens[:, 1:] for k in (1, 3))
  texts = np.asarray(jnp.where(accepted[:, None] > 0, long, short))
  p = p_value(texts, exact(group, SKEWED))
  assert p > SMALLEST_P if honest else p < SMALLEST_P


# Planted bugs of the noise.


def p_of(name: str, params=PARAMS, rule=None) -> float:
  return unfiltered(DRAFTERS[name](), params, rule)


def refused_again(self, node):  # the noise that the refused node was drawn by
  return self._gumbel(DRAFT, self.length, node + 1)


def colliding(self, node):  # the noise of node n decides what follows node n
  return self._gumbel(DRAFT, self.length, node)


def every_round_alike(self, node):
  return self._gumbel(NEXT, 0 * self.length, node)


def one_uniform(self, num_nodes, honest=Noise.accept):
  return jnp.broadcast_to(honest(self, 1), (len(self.keys), num_nodes))


@pytest.mark.parametrize(
  "method, wrong, name, params",
  [
    ("next", refused_again, "model", SKEWED),
    ("accept", one_uniform, "without_replacement", PARAMS),
    pytest.param("next", colliding, "model", PARAMS, marks=SLOW),
    pytest.param("next", every_round_alike, "lookup", PARAMS, marks=SLOW),
  ],
)
def test_b07_noise_that_is_reused_is_caught(
  monkeypatch, method, wrong, name, params
):
  monkeypatch.setattr(Noise, method, wrong)
  assert p_of(name, params) < SMALLEST_P


@pytest.mark.slow
def test_honest_noise_passes_where_reused_noise_is_caught():
  assert p_of("model", SKEWED) > SMALLEST_P


@pytest.mark.slow  # enumerated in acceptance_distribution_test
def test_b02_raw_distribution_claimed_for_a_filtered_draw_is_caught():
  honest = DRAFTERS["model"]()

  def propose(params, draft_state, context):
    draft, draft_state = honest.propose(params, draft_state, context)
    raw = jnp.maximum(draft.log_probs, jnp.log(0.1))  # tails were cut off
    return draft._replace(log_probs=jax.nn.log_softmax(raw)), draft_state

  drafter = honest._replace(propose=propose)
  [texts] = sample(drafter, acceptance.rejection(), 2, GROUPS[1:2])
  assert p_value(texts, EXACT[1]) < SMALLEST_P


# Draft noise named by position alone, as only coupled decoding may (rule 4):
# the draft tokens after a refused one are drawn again in the next round.

CAUGHT_P = 1e-60  # exact enumeration of the bug expects about 1e-120

# After 2 mostly 1, after 1 mostly 0. The draft is 2 far too often, so block
# accepts a 2 mostly where the draft token after it is the 1 that belongs
# there. The draft ignores the past: the same noise is the same draft token,
# whatever was committed.
POSITIONAL = Params(
  by_last_token([0.45, 0.35, 0.2], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]),
  by_last_token([0.1, 0.3, 0.6]),
)


@pytest.fixture
def by_position(monkeypatch):
  """Uncoupled draft tokens reuse noise across rounds, as coupled ones may."""

  def draft(self, depth, node):
    del node
    return self._gumbel(DRAFT, self.length - 1 + depth, 0)

  monkeypatch.setattr(Noise, "draft", draft)


def test_positional_draft_noise_under_block_is_caught(by_position):
  """How much is accepted depends on tokens that the next round draws again.

  A refused 2 says that no 1 was drafted after it; by then the noise of that
  place is no longer fresh.
  """
  assert p_of("model", POSITIONAL, acceptance.block()) < CAUGHT_P


def test_noise_of_its_own_round_passes_where_positional_noise_is_caught():
  assert p_of("model", POSITIONAL, acceptance.block()) > SMALLEST_P


@pytest.mark.slow
def test_rejection_on_a_chain_does_not_mind_positional_draft_noise(by_position):
  """No bias, by enumeration to 1e-15; this sample has p = 0.61.

  Whether a draft token is accepted depends on it and on those before it. The
  first refusal ends the round and the correction takes that place, so the next
  round starts at noise that has decided nothing. A rule that looks ahead loses
  this.
  """
  assert p_of("model", POSITIONAL, acceptance.rejection()) > SMALLEST_P
