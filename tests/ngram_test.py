"""The 3-gram baseline: distributions that sum to one, and counts by hand."""

import numpy as np
import pytest

from specdec.training.ngram import Trigram


@pytest.mark.parametrize("context", [(0, 1), (1, 2), (2, 2), (4, 4), (0, 4)])
def test_distributions_sum_to_one(context):
  # Contexts that were seen, seen in part, and never: token 4 is in no text.
  stream = np.random.default_rng(0).integers(0, 4, 60)
  model = Trigram(stream, 5)
  texts = [np.array([*context, last]) for last in range(5)]
  distribution = np.exp([model.log_probs(text)[0] for text in texts])
  np.testing.assert_allclose(distribution.sum(), 1, rtol=1e-12)
  assert distribution.min() > 0


def test_by_hand():
  stream = np.array([0, 1, 2, 0, 1, 2, 0, 1, 3])
  model = Trigram(stream, 4)
  # Triples: 012 x2, 120 x2, 201 x2, 013 x1; discount 1 / (1 + 2 * 3) = 1/7.
  # Pairs by distinct triples: 12, 20, 01, 13, each 1: discount 4 / 4 = 1, so
  # all falls to singles: 2, 0, 1, 3, each 1, discount 1: uniform, 1/4.
  distribution = 2 / 3 - (1 / 7) / 3 + (2 / 7) / 3 * 0.25
  found = model.log_probs(np.array([0, 1, 2]))
  np.testing.assert_allclose(np.exp(found), [distribution], rtol=1e-12)


def test_beats_uniform_where_there_is_order():
  text = np.tile([0, 3, 1, 2], 30)
  assert Trigram(text[:80], 4).log_probs(text[80:]).mean() > np.log(0.8)


def test_too_short():
  with pytest.raises(ValueError, match="2 tokens"):
    Trigram(np.array([1, 2]), 4)
