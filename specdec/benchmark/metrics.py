"""One definition of every acceptance quantity, from the counts of decoding.

All are sums over rounds divided by sums over rounds, never means of ratios.
What is emitted or accepted is counted after trimming at an EOS or the length
limit, alike in autoregressive decoding and in speculation. What was drafted
after it was verified, so it counts as drafted and wasted, but it says nothing
about acceptance by position. Standard errors are of a ratio whose sampling unit
is one text (rounds of one text resemble each other), by linearisation; one text
has none.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.types import Stats

_FEW = 3  # samples, of which an error is rough: their number is shown


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A measured ratio; None where nothing finite was counted."""

  value: float | None
  error: float | None = None  # one standard error; None with a single sample
  samples: int | None = None  # texts or timings that the error is from

  def __str__(self) -> str:
    return format(self, ".2f")

  def __format__(self, form: str) -> str:
    """Writes '1.23 ± 0.04', or '1.23 ± 0.04 (n = 3)' where samples are few.

    Args:
      form: a format of floats, by default '.2f', perhaps with a space and a
        unit after it: '.2f x' writes '1.23 ± 0.04 x', '.0%' '87 ± 2 %'.
    """
    if self.value is None:
      return "-"
    form, _, unit = (form or ".2f").partition(" ")
    value, error = self.value, self.error
    if form.endswith("%"):
      form, unit, value = f"{form[:-1]}f", "%", 100 * value
      error = None if error is None else 100 * error
    text = f"{value:{form}}"
    if error is not None:
      text += f" ± {error:{form.lstrip('+')}}"
    if unit:
      text += f" {unit}"
    if error is not None and self.samples and self.samples <= _FEW:
      text += f" (n = {self.samples})"
    return text


def _error(value: float, relative: np.ndarray) -> float | None:
  """Of a product of sums, from each unit's relative share in its deviation."""
  if (n := len(relative)) < 2:
    return None
  return float(abs(value) * np.sqrt(n / (n - 1) * np.sum(relative**2)))


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
  """Returns sum(over) / sum(under), both of one number a text."""
  over, under = np.asarray(over, float), np.asarray(under, float)
  if not np.sum(under) or not np.all(np.isfinite([over, under])):
    return Estimate(None)
  value = float(np.sum(over) / np.sum(under))
  deviation = (over - value * under) / np.sum(under)
  return Estimate(value, _error(1.0, deviation), len(over))


def mean(values: Sequence[float]) -> Estimate:
  """Returns the mean of repeats; the error is by their spread, if several."""
  return ratio(values, np.ones(len(values)))


def geometric_mean(rates: Sequence[float] | np.ndarray) -> Estimate:
  """Returns the geometric mean of rates [repeats] or [repeats, prompts]; the
  error is by the spread of the repeats' means."""
  logs = np.log(np.asarray(rates, float))
  means, error = logs.reshape(len(logs), -1).mean(axis=1), None
  value = float(np.exp(np.mean(means)))
  if len(means) > 1:
    error = float(value * np.std(means, ddof=1) / np.sqrt(len(means)))
  return Estimate(value, error, len(means))


@dataclasses.dataclass(frozen=True)
class SpeculativeDecoding:
  """The acceptance metrics of vLLM, by its names and definitions.

  They are those of `metrics.speculative_decoding` in a response of vLLM (its
  acceptance_metrics.md), summed over texts. Of one decode our numbers differ:

  * we count what is committed: tokens accepted after an EOS or the length
    limit are not, and vLLM counts them before it trims;
  * a round without a draft is none of these steps, and is one of ours;
  * a draft is a tree: all its nodes are draft tokens, those of one path can be
    accepted.

  Attributes:
    mean_acceptance_length: 1 + num_accepted_draft_tokens / num_spec_steps, up
      to num_spec_tokens + 1; None where nothing was drafted. Ours,
      tokens_per_pass, is over all rounds and counts what was committed.
    draft_acceptance_rate: num_accepted_draft_tokens / num_draft_tokens.
    acceptance_histogram: [num_spec_tokens + 1], entry n the steps that accepted
      n tokens; their sum is num_spec_steps.
    num_spec_steps: rounds that verified a draft, summed over texts.
    num_accepted_draft_tokens: accepted, as in `Acceptance`.
    num_draft_tokens: drafted, as in `Acceptance`.
    num_spec_tokens: k, the most tokens that a step can accept; of a tree its
      levels.
  """

  mean_acceptance_length: float | None
  draft_acceptance_rate: float | None
  acceptance_histogram: tuple[int, ...]
  num_spec_steps: int
  num_accepted_draft_tokens: int
  num_draft_tokens: int
  num_spec_tokens: int

  @classmethod
  def of(
    cls, drafted: np.ndarray, accepted: np.ndarray, nodes: np.ndarray
  ) -> "SpeculativeDecoding":
    """Computes them from the counts of `Stats`, by row.

    Args:
      drafted, accepted: [R, D]. Every round that has a draft drafts depth 1:
        a row that is not done has room for one token.
      nodes: [R].
    """
    steps = int(np.sum(drafted[:, :1]))
    at_least = np.sum(accepted, axis=0)
    kept, proposed = int(np.sum(accepted)), int(np.sum(nodes))
    return cls(
      mean_acceptance_length=1 + kept / steps if steps else None,
      draft_acceptance_rate=kept / proposed if proposed else None,
      acceptance_histogram=(*(-np.diff([steps, *at_least, 0])).tolist(),),
      num_spec_steps=steps,
      num_accepted_draft_tokens=kept,
      num_draft_tokens=proposed,
      num_spec_tokens=accepted.shape[1],
    )


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """What became of the drafts of some texts. Positions count from 1.

  Attributes:
    texts: rows counted.
    target_passes: rounds, each one pass of the target, summed over texts.
    emitted: committed new tokens.
    drafted: drafted tokens that the target verified.
    accepted: those of them that were committed.
    wasted: drafted - accepted.
    tokens_per_pass: emitted / target_passes; 1 for autoregressive decoding.
    accepted_per_drafted: accepted / drafted.
    accepted_length: accepted tokens a round, of the rounds that had room for
      the whole draft: tokens_per_pass less 1, but for what the length limit
      cuts.
    prefix_acceptance: per position i, of the rounds that drafted that far (and
      had room for it, and met no EOS before) the share that accepted positions
      1 .. i.
    conditional: per position i, the same of the rounds in which i was
      evaluated: drafted, and everything before it accepted.
    alpha: accepted / evaluated over all positions: the maximum-likelihood rate
      if acceptance were independent and alike at every position.
    accepted_lengths: entry n counts the rounds that accepted n tokens.
    speculative_decoding: the same counts by vLLM's names.
  """

  texts: int
  target_passes: int
  emitted: int
  drafted: int
  accepted: int
  wasted: int
  tokens_per_pass: Estimate
  accepted_per_drafted: Estimate
  accepted_length: Estimate
  prefix_acceptance: tuple[Estimate, ...]
  conditional: tuple[Estimate, ...]
  alpha: Estimate
  accepted_lengths: tuple[int, ...]
  speculative_decoding: SpeculativeDecoding


def acceptance(stats: Sequence[Stats]) -> Acceptance:
  """Computes them over all rows of one or several batches."""

  def column(name: str) -> np.ndarray:
    return np.concatenate([np.asarray(getattr(s, name)) for s in stats])

  rounds, emitted, nodes = column("rounds"), column("emitted"), column("nodes")
  drafted, accepted = column("drafted"), column("accepted")  # [R, D]
  evaluated = column("evaluated")
  per_row = np.sum(accepted, axis=1)
  at_least = np.sum(accepted, axis=0)
  lengths = -np.diff([np.sum(rounds), *at_least, 0])

  def by_position(under: np.ndarray) -> tuple[Estimate, ...]:
    return tuple(ratio(a, u) for a, u in zip(accepted.T, under.T))

  return Acceptance(
    texts=len(rounds),
    target_passes=int(np.sum(rounds)),
    emitted=int(np.sum(emitted)),
    drafted=int(np.sum(nodes)),
    accepted=int(np.sum(per_row)),
    wasted=int(np.sum(nodes) - np.sum(per_row)),
    tokens_per_pass=ratio(emitted, rounds),
    accepted_per_drafted=ratio(per_row, nodes),
    accepted_length=ratio(column("kept"), column("whole")),
    prefix_acceptance=by_position(drafted),
    conditional=by_position(evaluated),
    alpha=ratio(per_row, np.sum(evaluated, axis=1)),
    accepted_lengths=tuple(int(n) for n in lengths),
    speculative_decoding=SpeculativeDecoding.of(drafted, accepted, nodes),
  )


@dataclasses.dataclass(frozen=True)
class Speed:
  """Speculative and autoregressive decoding of the same texts.

  Attributes:
    tokens, baseline_tokens: new tokens.
    seconds, baseline_seconds: what their rounds took, prefill left out.
    prefill_seconds, baseline_prefill_seconds: what prefill took before them;
      a draft model reads the prompt as well.
    tokens_per_second, baseline_tokens_per_second: their quotients.
    speedup: the quotient of those two, its error from the spread between the
      timed batches; of `median_speed` the median quotient of the pairs.
  """

  tokens: int
  baseline_tokens: int
  seconds: float
  baseline_seconds: float
  prefill_seconds: float
  baseline_prefill_seconds: float
  tokens_per_second: float
  baseline_tokens_per_second: float
  speedup: Estimate


def median_speed(
  tokens: int,
  seconds: Sequence[float],
  baseline_seconds: Sequence[float],
  prefill_seconds: Sequence[float],
  baseline_prefill_seconds: Sequence[float],
) -> Speed:
  """Returns the speed of pairs that decode the same tokens, by medians.

  What slows a machine for a while slows both of a pair, so their quotient says
  more than the quotient of the medians. All but `tokens`, new ones of one
  repetition, have an entry for each.
  """
  quotients = np.asarray(baseline_seconds) / np.asarray(seconds)
  value, error = float(np.median(quotients)), None
  if len(quotients) > 1:
    spread = np.std(np.log(quotients), ddof=1)
    # A median's error is that of a mean times sqrt(pi / 2), were all normal.
    error = float(value * spread * np.sqrt(np.pi / 2 / len(quotients)))
  times = seconds, baseline_seconds, prefill_seconds, baseline_prefill_seconds
  medians = [float(np.median(x)) for x in times]
  rates = tokens / medians[0], tokens / medians[1]
  speedup = Estimate(value, error, len(quotients))
  return Speed(tokens, tokens, *medians, *rates, speedup)


def speed(
  tokens: Sequence[int],
  seconds: Sequence[float],
  baseline_tokens: Sequence[int],
  baseline_seconds: Sequence[float],
  prefill_seconds: Sequence[float],
  baseline_prefill_seconds: Sequence[float],
) -> Speed:
  """Sums up pieces that were timed in both ways; one entry a piece in each."""
  times = seconds, baseline_seconds, prefill_seconds, baseline_prefill_seconds
  columns = [np.asarray(x, float) for x in (tokens, baseline_tokens, *times)]
  total, baseline_total, *sums = (float(np.sum(x)) for x in columns)
  rates = total / sums[0], baseline_total / sums[1]
  value = rates[0] / rates[1]
  a, b, c, d = (x / np.sum(x) for x in columns[:4])
  return Speed(
    int(total),
    int(baseline_total),
    *sums,
    *rates,
    Estimate(value, _error(value, a - c - b + d), len(a)),
  )


def speed_of(pieces: Sequence[Mapping]) -> Speed:
  """Sums up pieces whose entries are named as the arguments of `speed`."""
  names = inspect.signature(speed).parameters
  return speed(*([piece[name] for piece in pieces] for name in names))
