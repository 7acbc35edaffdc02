"""Beam search with a drafter beside plain beam search, timed in turns.

Invariant: both find the same beams, or how far apart their scores are is said.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import beam
from specdec.benchmark import metrics, runs
from specdec.benchmark.batches import Batch
from specdec.benchmark.decoder import Decoder
from specdec.utils import terminal


@dataclasses.dataclass
class Beams:
  """The beams of one batch, and what they took."""

  texts: list[list[list[int]]]  # [prompts][beams] new token ids, best first
  scores: np.ndarray  # [prompts, w]
  rounds: int  # passes of the target after prefill
  seconds: float  # of all rounds, prefill excluded


def search(decoder: Decoder, batch: Batch, how: beam.Search) -> Beams:
  """Searches the prompts of a batch with the drafter of a decoder.

  Its temperature, filters and acceptance rule have no part in it.
  """
  inputs = decoder.inputs(batch)._replace(index=None)
  beam.check(decoder.target, how, decoder.eos_ids)
  inputs = jax.tree.map(jnp.asarray, inputs)
  parts = decoder.target, decoder.drafter, how, decoder.params
  beams = beam.start(*parts, inputs, decoder.max_length)
  eos_ids = jnp.asarray(decoder.eos_ids, jnp.int32)
  beams = jax.block_until_ready(beams)
  begin = time.perf_counter()
  beams = jax.block_until_ready(beam.run(*parts, beams, eos_ids))
  seconds = time.perf_counter() - begin
  best = jax.tree.map(np.asarray, beams.best)
  count, begins = len(batch.rows), np.asarray(beams.begin)
  texts = [
    [
      best.tokens[row, i, begins[row] : best.length[row, i]].tolist()
      for i in range(how.width)
    ]
    for row in range(count)
  ]
  stats = beams.state.stats
  return Beams(texts, best.scores[:count], int(stats.widths.sum()), seconds)


def compare(
  decoder: Decoder,
  batches: Sequence[Batch],
  searches: Sequence[beam.Search],
  repeats: int,
) -> Iterator[dict]:
  """Yields, for every search, what a drafter gains over plain beam search.

  The speedup is the geometric mean over batches of seconds over seconds, its
  standard error that of the batches; of one batch that of the repeats.
  """
  ways = {runs.OURS: decoder, runs.BASELINE: decoder.baseline()}
  for how in searches:
    with terminal.progress(f"compiling a search of width {how.width}"):
      for way in ways.values():
        search(way, batches[0], how)
    searching = {
      name: lambda batch, way=way, how=how: search(way, batch, how)
      for name, way in ways.items()
    }
    with terminal.progress(f"searching with width {how.width}"):
      results = [*runs.interleave(searching, batches, repeats)]
    ours, plain = ([x[name] for x in results] for name in ways)
    shape = repeats, len(batches)
    seconds = [[x.seconds for x in part] for part in (ours, plain)]
    quotients = np.divide(seconds[1], seconds[0]).reshape(shape)
    by_batch = quotients.T if len(batches) > 1 else quotients
    same = [
      a.texts == b.texts for a, b in zip(ours[: shape[1]], plain[: shape[1]])
    ]
    apart = max(
      float(np.abs(a.scores - b.scores).max()) for a, b in zip(ours, plain)
    )
    rounds, steps = (sum(x.rounds for x in part) for part in (ours, plain))
    yield {
      "width": how.width,
      "length_penalty": how.length_penalty,
      "early_stopping": how.early_stopping,
      "rounds": rounds // repeats,
      "steps": steps // repeats,
      "steps_per_round": steps / rounds,
      "seconds": sum(seconds[0]) / repeats,
      "plain_seconds": sum(seconds[1]) / repeats,
      "speedup": dataclasses.asdict(metrics.geometric_mean(by_batch)),
      "error_over": "batches" if len(batches) > 1 else "repeats",
      "batches": len(batches),
      "same_beams": sum(same),
      "largest_score_difference": apart,
    }
