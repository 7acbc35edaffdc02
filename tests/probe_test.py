"""Expected acceptance by the distributions is what rounds accept."""

import jax
import numpy as np
import pytest

from specdec import acceptance, draft_shape, draft_tree, drafters
from specdec.benchmark import expected_acceptance, metrics
from specdec.benchmark.batches import Batch
from specdec.benchmark.decoder import Decoder
from specdec.roofline import trees
from specdec.testing import table_model
from specdec.types import Params

V = 3
PARAMS = Params(
  *(table_model.init_params(jax.random.key(i), V, 1.2) for i in (0, 1))
)
ROWS = [[0]] * 300
SHAPES = {
  "chain": None,
  "chains": draft_shape.static(draft_tree.parallel(3, 2), "iid"),
  "tree": draft_shape.static([-1, 0, 0, 1, 1]),
  "dynamic": draft_shape.dynamic(2, 3, 5),
}


def decoder_of(shape, rule, batch=300):
  model = table_model.model(V)
  drafter = drafters.model(model, 3)
  if shape is not None:
    drafter = drafters.model(model, shape=shape)
  key = jax.random.key(0)
  return Decoder(
    model, drafter, rule, PARAMS, key, batch, 64, 64, temperature=1
  )


@pytest.mark.parametrize(
  "name, rule, others",
  [
    ("chain", acceptance.rejection, [acceptance.block, acceptance.naive]),
    ("chain", acceptance.coupled, [acceptance.rejection]),
    ("chains", acceptance.kseq, [acceptance.rejection]),
    ("dynamic", acceptance.coupled, [acceptance.rejection]),
    ("tree", acceptance.traversal, [acceptance.rejection]),
    pytest.param("chain", acceptance.block, [], marks=pytest.mark.slow),
    pytest.param("tree", acceptance.rejection, [], marks=pytest.mark.slow),
  ],
)
def test_rounds_keep_what_is_expected_of_them(name, rule, others):
  decoder = decoder_of(SHAPES[name], rule())
  rules = [rule(), *(other() for other in others)]
  sums, rounds = expected_acceptance.expected_lengths(decoder, ROWS, rules)
  expected = metrics.ratio(sums[0], rounds)
  stats = decoder.complete(Batch(ROWS, range(300))).stats
  measured = metrics.acceptance([stats]).accepted_length
  np.testing.assert_array_equal(rounds.sum(), stats.whole.sum())
  error = np.hypot(measured.error, expected.error)
  assert abs(measured.value - expected.value) < 4 * error
  assert error < 0.03
  if others == [acceptance.block, acceptance.naive]:
    assert np.all(sums[1].sum() > sums[0].sum())
    assert np.all(sums[2] < sums[0])
  if name == "chains":
    assert sums[0].sum() > sums[1].sum()  # k-SEQ over rejection
  if name == "dynamic":  # of point masses both keep the same
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-4)


def test_acceptance_by_depth_adds_up_to_what_a_comb_keeps():
  paths = [(0,), (1,), (2,), (0, 0), (0, 1)]
  comb = draft_shape.static(draft_tree.from_paths(paths))
  decoder = decoder_of(comb, acceptance.rejection(), batch=100)
  # In three batches.
  rates = expected_acceptance.acceptance_by_depth(decoder, ROWS)
  sums, rounds = expected_acceptance.expected_lengths(
    decoder, ROWS, [decoder.rule, acceptance.coupled()]
  )
  np.testing.assert_allclose(
    rates[0].sum() + rates[0, 0] * rates[1].sum(),
    sums[0].sum() / rounds.sum(),
    rtol=1e-4,
  )
  assert rates.shape == (2, 3) and rates[1, 2] == 0
  assert np.all(rates[:, 0] > rates[:, 1:].max(1))
  assert np.all(np.isnan(sums[1]))  # the rule does not know it


def test_a_ragged_acceptance_by_depth_is_padded():
  rates = trees.by_depth([[0.6, 0.2], [0.5]], 3)
  np.testing.assert_array_equal(rates, [[0.6, 0.2], [0.5, 0.0]])
  np.testing.assert_array_equal(trees.by_depth([0.6, 0.2], 2), [[0.6, 0.2]] * 2)
