"""Which experts of a mixture the tokens of a pass choose."""

from pathlib import Path

import numpy as np
import pytest

import programs
from specdec import checkpoints
from specdec.benchmark import expert_counts
from specdec.report import mixture_tables
from specdec.roofline.cost import experts_touched

MIXTURE = Path(__file__).parent / "fixtures" / "parity" / "qwen3_moe"


def routes(chosen):
  """[1, B, T, 4] bool of numbers of experts [B, T, 2]."""
  return np.any(np.eye(4, dtype=bool)[np.array(chosen)], axis=2)[None]


def test_counts_by_hand():
  chosen = routes([
    [[0, 1], [0, 1], [2, 3], [0, 2]],
    [[0, 1], [1, 2], [1, 2], [1, 2]],
  ])  # fmt: skip
  one, two, _ = expert_counts.counts(np.repeat(chosen, 3, 0), [1, 2, 2])
  assert (one.of_one_text.value, one.of_many_texts.value) == (2, 2)
  # Pieces of two: {0,1}, {0,2,3} and {0,1,2}, {1,2}.
  assert two.of_one_text.value == pytest.approx((2 + 3 + 3 + 2) / 4)
  # Pairs at one position: {0,1}, {0,1,2}, {1,2,3}, {0,1,2}.
  assert two.of_many_texts.value == pytest.approx((2 + 3 + 3 + 3) / 4)
  assert two.of_one_text.error == 0
  for size in (0, 3):
    with pytest.raises(ValueError, match="2 texts of 4 tokens; give 1 to 2"):
      expert_counts.counts(chosen, [size])


@pytest.mark.parametrize("r", [0.0, 0.37, 1.0])
def test_the_correlation_that_made_the_counts_is_the_best(r):
  estimates = [
    expert_counts.Estimate(experts_touched(64, 4, m, r)) for m in (2, 5, 9)
  ]
  counted = [expert_counts.Count(m, x, x) for m, x in zip((2, 5, 9), estimates)]
  best = expert_counts.correlation(counted, lambda x: x.of_one_text, 64, 4)
  assert best == pytest.approx(r, abs=0.005)


def test_a_token_chooses_what_its_router_says():
  loaded = checkpoints.load(MIXTURE)
  config = loaded.config
  texts = np.random.default_rng(0).integers(64, size=(5, 12)).tolist()
  chosen = expert_counts.routed(loaded, texts, 2)
  shape = config.num_layers, 5, 12, config.num_experts
  assert chosen.shape == shape and chosen.dtype == bool
  assert np.all(chosen.sum(-1) == config.experts_per_token)
  # A text does not depend on its neighbours.
  alone = expert_counts.routed(loaded, texts[3:4], 1)
  np.testing.assert_array_equal(alone[:, 0], chosen[:, 3])
  with pytest.raises(ValueError, match="as many tokens"):
    expert_counts.routed(loaded, [[1, 2], [1]], 1)


def test_the_program_counts_and_refuses_a_dense_model(tmp_path, capsys):
  path = tmp_path / "counts.json"
  flags = f"--target={MIXTURE}", "--context=16", "--samples=6", "--tokens=1,4"
  programs.run("count_experts", *flags, f"--json={path}")
  assert "experts of 8 that are touched" in capsys.readouterr().out
  dense = programs.write_model(tmp_path / "dense")
  with pytest.raises(SystemExit, match="is no mixture of experts"):
    programs.run("count_experts", f"--target={dense}")


def test_rounds_by_batch_beside_the_bytes_of_their_passes():
  """At batch 1 five tokens read more experts than one, measured and priced."""

  def run(batch, speedup):
    return {
      "batch": batch,
      "k": 4,
      "nodes": 5,
      "context": 64,
      "rounds": 10,
      "acceptance": {"tokens_per_pass": {"value": 3.0}},
      "speed": {"tokens": 20 * batch, "speedup": {"value": speedup}},
    }

  def timed(batch, tokens, seconds):
    times = {"median": seconds}
    return {"batch": batch, "tokens": tokens, "seconds": times}

  document = {
    "settings": {
      "target": "configs/shapes/mixture",
      "acceptance": "synthetic(0.8)",
    },
    "runs": [run(1, 0.7), run(64, 2.5)],
    "passes": [
      *(timed(1, 1, 0.01), timed(1, 5, 0.04)),
      *(timed(64, 1, 0.2), timed(64, 5, 0.25)),
    ],
  }
  table = mixture_tables.mixture_batches({"x": document}, "x")
  one, many = (
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in table.splitlines()[2:]
  )
  assert one[:3] == ["1", "4.0", "17.7"] and many[:2] == ["64", "63.0"]
  measured, priced = map(float, one[3].split(" / "))
  assert measured == 4.0 and 2 < priced < 4.4
  # At the rate, whatever the rounds that were timed yielded: 2 tokens each.
  tokens = (1 - 0.8**5) / 0.2
  speedups = [float(x) for x in one[5].split(" / ")]
  expected = 0.7 * tokens / 2, tokens / priced
  assert speedups == pytest.approx(expected, abs=0.01)
  measured, priced = map(float, many[3].split(" / "))
  assert measured == 1.25 and 1 <= priced < 1.2
