"""Traces: of five steps of a training run, after those that compile."""

import contextlib

import jax
import pytest

from specdec.utils import profiling


@pytest.fixture
def events(monkeypatch):
  """What begins and ends."""
  seen = []

  @contextlib.contextmanager
  def trace(folder):
    seen.append(f"begin {folder}")
    yield
    seen.append("end")

  monkeypatch.setattr(jax.profiler, "trace", trace)
  return seen


def test_steps_of_a_run_that_resumes(events):
  steps = profiling.Steps("here", 100)
  for step in range(100, 130):
    steps.before(step, ())
    events.append(step)
  steps.close()
  first = 100 + profiling.WAIT
  begin, end = events.index("begin here"), events.index("end")
  assert events[begin + 1 : end] == [*range(first, first + profiling.COUNT)]
  assert len(events) == 32


def test_a_run_that_ends_meanwhile_ends_its_trace(events):
  steps = profiling.Steps("here", 0)
  for step in range(profiling.WAIT + 2):
    steps.before(step, ())
  steps.close()
  assert events == ["begin here", "end"]


def test_none_without_a_folder(events):
  steps = profiling.Steps(None, 0)
  for step in range(40):
    steps.before(step, ())
  with profiling.trace(None):
    pass
  assert events == []
