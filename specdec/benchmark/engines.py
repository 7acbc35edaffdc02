"""Decoding by specdec and by other engines, in turns, on the same prompts.

Invariant: every engine writes as many new tokens of a prompt as the float32
autoregressive text has, one text at a time, and the clock runs from the moment
that all of the prompt but its last token has been read.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.benchmark import metrics, provenance, runs, timing
from specdec.benchmark.batches import Batch, batches_of
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.metrics import Estimate
from specdec.benchmark.peers import Engine
from specdec.benchmark.prompts import Corpus
from specdec.benchmark.results import Identity

PASSES = 1, 8  # tokens of the passes that are timed
_WARM, _TIMED = 8, 8  # tokens, and passes in a timing, of a peer


class Decoded(NamedTuple):
  """One text, as runs.Comparison takes it."""

  texts: list[list[int]]
  seconds: float


def decode(engine: Engine, counts: Sequence[int], batch: Batch) -> Decoded:
  """Decodes a batch of one prompt to counts[its number] new tokens."""
  [prompt], [number], text = batch.rows, batch.numbers, []
  engine.read(prompt[:-1])
  begin, token = time.perf_counter(), prompt[-1]
  for _ in range(counts[number]):
    token = engine.step([token])
    text.append(token)
  return Decoded([text], time.perf_counter() - begin)


def _pass_timer(
  engine: Engine, context: Sequence[int], tokens: int
) -> Callable[[], float]:
  """Returns what times passes of so many tokens: seconds of one, at a call."""

  def timed() -> float:
    engine.read(context)
    seconds = 0.0
    for _ in range(_TIMED):
      begin = time.perf_counter()
      engine.step(context[:1] * tokens)
      seconds += time.perf_counter() - begin
      engine.rewind(len(context))
    return seconds / _TIMED

  return timed


@dataclasses.dataclass(frozen=True)
class Measured:
  """What one engine did.

  Attributes:
    tokens_per_second: of each prompt; errors are from the repeats' spread.
    mean: their geometric mean.
    speedup: the geometric mean of quotients by the baseline's, repeat by
      repeat.
    identity: texts compared with the baseline's.
    pass_seconds: pairs of tokens and the median seconds of a pass over them;
      None for speculative decoding, whose passes are the baseline's.
  """

  name: str
  tokens_per_second: tuple[Estimate, ...]
  mean: Estimate
  speedup: Estimate
  identity: Identity
  pass_seconds: tuple[tuple[int, float], ...] | None

  def document(self) -> dict:
    """Returns the numbers for JSON."""
    document = dataclasses.asdict(self)
    document["identity"]["share"] = self.identity.share
    return document


def measure(
  decoders: Mapping[str, Decoder],
  peers: Mapping[str, Engine],
  rows: Sequence[Sequence[int]],
  repeats: int,
) -> tuple[runs.Comparison, list[Measured]]:
  """Decodes all prompts `repeats` times with each engine, and times passes.

  The decoders are of batch 1, and one of them is runs.BASELINE.
  """
  batches, baseline = batches_of(rows, 1), decoders[runs.BASELINE]
  for decoder in decoders.values():
    decoder.warm_up(batches[0].rows)
  counts = [baseline.complete(batch).num_tokens for batch in batches]
  ways = {name: one.complete for name, one in decoders.items()}
  for name, engine in peers.items():
    decode(engine, [_WARM], batches[0])
    ways[name] = functools.partial(decode, engine, counts)
  results = [*runs.interleave(ways, batches, repeats)]
  # Where a peer leaves the baseline's text, the baseline says how near to a
  # tie that was.
  whole = {**decoders, **dict.fromkeys(peers, baseline)}
  comparison = runs.Comparison(whole, batches, results)
  passes = _time_passes(baseline, peers, rows, repeats)
  seconds = {
    name: np.reshape(
      [one.seconds for one in comparison.of(name)], (repeats, -1)
    )
    for name in ways
  }
  measured = []
  for name, taken in seconds.items():
    differences = comparison.differences(name)
    each = zip(counts, taken.T)
    measured.append(
      Measured(
        name,
        tuple(metrics.ratio([n] * repeats, column) for n, column in each),
        metrics.geometric_mean(np.array(counts) / taken),
        metrics.geometric_mean(seconds[runs.BASELINE] / taken),
        Identity(len(rows), len(rows) - len(differences), differences),
        passes.get(name),
      )
    )
  return comparison, measured


def _time_passes(
  baseline: Decoder,
  peers: Mapping[str, Engine],
  rows: Sequence[Sequence[int]],
  repeats: int,
) -> dict[str, tuple[tuple[int, float], ...]]:
  """Times passes over PASSES after the first prompt, in turns."""
  context = list(rows[0])
  place = len(context), baseline.max_length
  timers = {
    (runs.BASELINE, n): timing.pass_timer(
      baseline.target, baseline.params.target, 1, n, *place
    )
    for n in PASSES
  }
  for name, engine in peers.items():
    for n in PASSES:
      timers[name, n] = _pass_timer(engine, context, n)
      timers[name, n]()
  seconds = {key: [] for key in timers}
  for _ in range(max(repeats, 5)):
    for key, timer in timers.items():
      seconds[key].append(timer())
  return {
    name: tuple((n, float(np.median(seconds[name, n]))) for n in PASSES)
    for name in (runs.BASELINE, *peers)
  }


def document(
  header: dict,
  comparison: runs.Comparison,
  measured: Sequence[Measured],
  corpus: Corpus,
) -> dict:
  """Returns the document of compare_engines.py."""
  loads = header["machine"]["load"], provenance.load()
  speculative = (
    one.name
    for one in measured
    if comparison.decoders[one.name].drafter.spec.max_depth
  )
  texts = comparison.texts(runs.BASELINE)
  return header | {
    "runs": [
      comparison.run(name, comparable=True).document() for name in speculative
    ],
    "engines": [one.document() for one in measured],
    "decoded": [
      {"group": group, "prompt_tokens": len(ids), "new_tokens": len(text)}
      for group, ids, text in zip(corpus.groups, corpus.encoded, texts)
    ],
    "measured": {
      "first": header["date"],
      "last": provenance.now(),
      "highest_load": max((x for x in loads if x is not None), default=None),
    },
    "broken_lines": corpus.broken,
    "too_long": corpus.too_long,
  }
