"""The best tree against exhaustive search over all trees."""

import numpy as np
import pytest

from specdec import draft_tree
from specdec.roofline import trees

RATES = [0.6, 0.2, 0.1]
FLAT = {n: 1.0 for n in range(1, 9)}  # a pass costs the same, however wide
STEEP = {n: float(n) for n in range(1, 9)}


def test_expected_tokens_are_the_products_of_the_paths():
  paths = [(0,), (1,), (0, 0), (0, 1)]
  expected = 1 + 0.6 + 0.2 + 0.36 + 0.12
  assert trees.expected_tokens(paths, RATES) == pytest.approx(expected)
  assert trees.expected_tokens([], RATES) == 1


@pytest.mark.parametrize("level_seconds", [0.0, 0.05, 0.5, 2.0])
def test_no_size_and_depth_pays_more(level_seconds):
  choice = trees.best(RATES, FLAT, level_seconds)
  rate = choice.tokens / choice.seconds
  for size in range(8):
    for levels in range(1, 8):
      paths = draft_tree.optimal(np.tile(RATES, (levels, 1)), size)
      depth = max(map(len, paths), default=0)
      tokens = trees.expected_tokens(paths, RATES)
      assert tokens / (1.0 + depth * level_seconds) <= rate + 1e-12


def test_free_levels_fill_the_pass_and_dear_ones_are_not_drafted():
  free = trees.best(RATES, FLAT, 0.0)
  assert len(free.paths) == 7
  assert trees.best(RATES, FLAT, 10.0).paths == []
  dear = trees.best(RATES, FLAT, 0.3)
  assert 0 < len(dear.paths[-1]) < len(free.paths[-1])


def test_where_every_node_costs_a_token_nothing_is_drafted():
  assert trees.best(RATES, STEEP, 0.0) == ([], 1.0, 1.0)


def test_times_between_the_measured_ones_are_interpolated():
  choice = trees.best([0.9], {1: 1.0, 5: 1.4}, 0.0)
  assert len(choice.paths) == 4
  assert trees.best([0.9], {1: 1.0, 3: 1.2, 5: 9.0}, 0.0).seconds == 1.2


def test_without_autoregressive_texts_time_nothing_can_be_chosen():
  with pytest.raises(ValueError, match="lacks 1"):
    trees.best(RATES, {2: 1.0}, 0.0)
