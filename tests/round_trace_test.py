"""Recorded rounds are the rounds of the loop: same text, and how it came."""

import numpy as np
import pytest

from specdec.benchmark.round_trace import Tracer
from specdec.benchmark.setup import Setup
from specdec.types import ACCEPTED

ROWS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6]]


def decoder(target, **options):
  usual = dict(
    target=str(target), max_new_tokens=24, batch=3, prompt_size=64, k=3
  )
  return Setup(**(usual | options)).load()


@pytest.mark.parametrize(
  "options",
  [
    dict(drafter="early_exit(1)", acceptance="rejection", temperature=1.0),
    dict(drafter="early_exit(1)", shape="dynamic(6, top=2)"),
    dict(drafter="lookup"),
    dict(drafter="none", k=None),
  ],
)
def test_rounds_of_a_decoder(target, options):
  way = decoder(target, **options)
  [batch] = way.encode(ROWS)
  seen = [[], []]

  def push(row, new):
    seen[row].append(new)
    return False

  tracer = Tracer(way)
  completed = way.decode(batch, push, run=tracer)
  assert completed.texts == way.complete(batch).texts
  assert len(tracer.rounds) == 3 and tracer.rounds[2] == []  # an empty row
  for row, (rounds, pieces) in enumerate(zip(tracer.rounds, seen)):
    pieces = [piece for piece in pieces if len(piece.ids)]
    assert len(rounds) == len(pieces) == completed.stats.rounds[row]
    pending = ROWS[row][-1]
    for one, new in zip(rounds, pieces):
      count = np.sum(new.origins == ACCEPTED)
      assert len(one.path) == count
      assert one.tokens[0] == pending and one.parents[0] == -1
      assert [*one.parents[one.path]] == [0, *one.path][:count]
      np.testing.assert_array_equal(one.tokens[one.path], new.ids[:count])
      for ours, theirs in (
        (one.log_probs, new.log_probs),
        (one.draft_log_probs, new.draft_log_probs),
      ):
        np.testing.assert_allclose(
          ours[one.path], theirs[:count], rtol=1e-4, atol=1e-5
        )
      pending = new.ids[-1]


def test_a_row_that_is_stopped_has_no_more_rounds(target):
  way = decoder(target, drafter="early_exit(1)")
  [batch] = way.encode(ROWS)
  tracer = Tracer(way)
  way.decode(batch, lambda row, new: row == 0, run=tracer)
  assert len(tracer.rounds[0]) == 1 < len(tracer.rounds[1])
