"""Speedups at the rate of `synthetic` acceptance, not at what chance made it.

The few rounds of a short text accept more or less than their rate says, and two
such texts are compared by what a round takes, not by their luck.
"""

from collections.abc import Mapping

from specdec.acceptance.synthetic import prefix_acceptance
from specdec.benchmark.metrics import Estimate
from specdec.benchmark.setup import Setup
from specdec.roofline import theory


def tokens_of(settings: Mapping, k: int) -> float:
  """Returns the mean tokens of a round of a chain of k draft tokens.

  Args:
    settings: of a document whose acceptance is synthetic.
  """
  arguments = Setup(acceptance=settings["acceptance"]).rule_arguments
  return theory.expected_tokens(prefix_acceptance(k, **arguments))


def speedup(run: Mapping, tokens: float) -> Estimate:
  """Returns the speedup of rounds that take what a run's took, and yield so
  many tokens each."""
  speed = run["speed"]
  timed = speed["tokens"] / (run["rounds"] * run["batch"])
  value, error = speed["speedup"]["value"], speed["speedup"].get("error")
  share = tokens / timed
  return Estimate(
    share * value,
    None if error is None else share * error,
    speed["speedup"].get("samples"),
  )
