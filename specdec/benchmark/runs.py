"""The loop that compares ways of decoding: in turns, timed and summed up.

Whoever goes first changes from batch to batch and from repeat to repeat, so
that a machine whose speed drifts drifts under all ways alike.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from specdec.benchmark import differences, metrics
from specdec.benchmark.batches import Batch, Completed
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.results import Identity, Run
from specdec.utils import profiling

T = TypeVar("T")
OURS, BASELINE = "speculative", "baseline"


def interleave(
  ways: Mapping[str, Callable[[Batch], T]],
  batches: Sequence[Batch],
  repeats: int = 1,
  renumber: int = 0,
  first_turn: int = 0,
) -> Iterator[dict[str, T]]:
  """Decodes every batch in every way, and yields each batch's results.

  Args:
    ways: by name, what decodes a batch.
    repeats: how often all batches are decoded.
    renumber: added to the prompts' numbers from repeat to repeat, so that each
      has noise of its own; 0: all have the same.
    first_turn: turns of an earlier call, which this one goes on from.
  """
  names = list(ways)
  for i in range(repeats * len(batches)):
    repeat, number = divmod(i, len(batches))
    first = (first_turn + repeat + number) % len(names)
    batch = batches[number]
    if renumber:
      numbers = [n + repeat * renumber for n in batch.numbers]
      batch = Batch(batch.rows, numbers)
    results = {
      name: ways[name](batch) for name in names[first:] + names[:first]
    }
    yield {name: results[name] for name in names}


@dataclasses.dataclass
class Comparison:
  """Ways of decoding that were compared on the same batches.

  Attributes:
    decoders: by name; one of them is BASELINE.
    batches: what was decoded, `repeats` times each.
    results: of each batch in the order of decoding, by name.
    same_noise: repeats decoded the same texts again.
  """

  decoders: dict[str, Decoder]
  batches: list[Batch]
  results: list[dict[str, Completed]]
  same_noise: bool = True

  def of(self, name: str) -> list[Completed]:
    """Returns every batch that was decoded in one way."""
    return [results[name] for results in self.results]

  def distinct(self, name: str) -> list[Completed]:
    """Returns one of the batches that have the same texts."""
    count = len(self.batches) if self.same_noise else len(self.results)
    return self.of(name)[:count]

  def texts(self, name: str) -> list[list[int]]:
    """Returns the texts of the first repeat, in the prompts' order."""
    some = self.of(name)[: len(self.batches)]
    return [text for one in some for text in one.texts]

  def differences(self, name: str) -> tuple[str, ...]:
    """Describes where texts of the first repeat leave the baseline's."""
    rows = [(*x,) for b in self.batches for x in zip(b.rows, b.numbers)]
    return tuple(
      differences.first_difference(
        self.decoders[name], prompt, text, other, number
      )
      for (prompt, number), text, other in zip(
        rows, self.texts(name), self.texts(BASELINE)
      )
      if text != other
    )

  def speed(self, name: str) -> metrics.Speed:
    """Sums up one way's speed against the baseline's."""
    columns = (
      [getattr(one, column) for one in self.of(way)]
      for column in ("num_tokens", "seconds", "prefill_seconds")
      for way in (name, BASELINE)
    )
    tokens, other_tokens, seconds, other_seconds, *prefill = columns
    return metrics.speed(tokens, seconds, other_tokens, other_seconds, *prefill)

  def run(
    self,
    name: str,
    k: int | None = None,
    comparable: bool = False,
    speed: metrics.Speed | None = None,
  ) -> Run:
    """Sums up one way.

    Args:
      k: levels that were asked for; default the drafter's depth.
      comparable: texts should equal the baseline's: counts those that do.
      speed: instead of the sum over all batches.
    """
    decoder, identity = self.decoders[name], None
    if comparable:
      differences, total = self.differences(name), len(self.texts(name))
      identity = Identity(total, total - len(differences), differences)
    return Run(
      "all",
      decoder.drafter.spec.max_depth if k is None else k,
      decoder.num_nodes,
      decoder.batch,
      metrics.acceptance([one.stats for one in self.distinct(name)]),
      speed or self.speed(name),
      identity,
    )


def compare(
  decoders: Mapping[str, Decoder],
  batches: Sequence[Batch],
  repeats: int = 1,
  renumber: int = 0,
  progress: Callable[[], object] | None = None,
) -> Comparison:
  """Decodes batches in several ways, interleaved, and times each.

  Args:
    decoders: by name; those that are not warm yet are warmed up first.
    repeats, renumber: as `interleave` takes them.
    progress: called after each batch.
  """
  for decoder in decoders.values():
    decoder.warm_up(batches[0].rows)
  ways = {name: one.complete for name, one in decoders.items()}
  results = []
  for one in interleave(ways, batches, repeats, renumber):
    results.append(one)
    if progress:
      progress()
  sampled = any(one.temperature > 0 for one in decoders.values())
  same_noise = not (renumber and sampled)
  return Comparison(dict(decoders), list(batches), results, same_noise)


def trace(folder: str, decoders: Mapping[str, Decoder], batch: Batch) -> None:
  """Decodes a batch each way under the profiler, for XProf to show."""
  for decoder in decoders.values():
    decoder.warm_up(batch.rows)
  with profiling.trace(folder):
    compare(decoders, [batch])
