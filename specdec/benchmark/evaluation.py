"""Decodes files of prompts, interleaved with the baseline, and sums by group.

Invariant: a batch is of one group and one shape, so its time belongs to the
group; what is kept of it is one line of JSON that says everything.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec.benchmark import metrics, provenance, results, runs
from specdec.benchmark.batches import Batch
from specdec.benchmark.comparison import resume
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.prompts import Corpus
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target
from specdec.types import Stats
from specdec.utils import files, terminal

# Tokens of a prompt, and prompts of a group, to tell text from random tokens.
_LOOKED_AT, _ROWS = 128, 4
_SMALLEST = 256  # tokens of the smallest prompt buffer; others double it


def buffer_size(length: int = 0) -> int:
  """Returns P, the smallest of few prompt buffers with so many tokens."""
  size = _SMALLEST
  while size < length:
    size *= 2
  return size


def decode(
  setups: Mapping[int, Setup],
  target: Target,
  corpus: Corpus,
  lines: files.Lines,
) -> list[dict]:
  """Decodes all prompts with the setup of each k; returns a line for every
  batch. Those that `lines` does not hold are decoded, and kept there."""
  [setup, *_] = setups.values()
  kinds: dict[tuple[int, str], list[int]] = {}
  for i, (ids, group) in enumerate(zip(corpus.encoded, corpus.groups)):
    kinds.setdefault((buffer_size(len(ids)), group), []).append(i)
  # In order of size, each of which is compiled once.
  points = {}
  for (size, group), members in sorted(kinds.items()):
    for first in range(0, len(members), setup.batch):
      numbers = members[first : first + setup.batch]
      points[group, *numbers] = len(points), size, numbers

  @functools.lru_cache(maxsize=1)
  def decoders_of(size: int) -> dict[int | str, Decoder]:
    decoders_of.cache_clear()  # before others are built
    _, _, numbers = next(x for x in points.values() if x[1] == size)
    decoders, rows = {}, [corpus.encoded[i] for i in numbers]
    for k, one in setups.items():
      with terminal.progress(
        f"compiling k = {k} for prompts up to {size} tokens"
      ):
        one = dataclasses.replace(one, prompt_size=size)
        decoders[k] = one.decoder(target)
        decoders[k].warm_up(rows)
    with terminal.progress("compiling the baseline"):
      decoders[runs.BASELINE] = decoders[k].baseline()
      decoders[runs.BASELINE].warm_up(rows)
    return decoders

  def measure(point: tuple[int, int, list[int]]) -> dict:
    turn, size, numbers = point
    batch = Batch([corpus.encoded[i] for i in numbers], numbers)
    line = _decode_batch(decoders_of(size), batch, turn, setup.comparable)
    return line | {"date": provenance.now()}

  return resume(lines, points, measure, "batch")


def unlikely(
  target: Target, encoded: Sequence[Sequence[int]], groups: Sequence[str]
) -> list[str]:
  """Returns a sentence where groups of prompts look like random tokens: where
  the target finds a few of one, together, no likelier than tokens drawn evenly.

  Only of trained decoders on one device.
  """
  if target.places or target.random_weights or target.model.encode:
    return []
  params, size = target.checkpoint.params, target.checkpoint.config.vocab_size
  losses = {}
  for group in dict.fromkeys(groups):
    own = [ids for ids, name in zip(encoded, groups) if name == group]
    rows = [ids[:_LOOKED_AT] for ids in own[:: -(-len(own) // _ROWS)]]
    tokens = np.zeros((_ROWS, _LOOKED_AT), np.int32)
    lengths = np.zeros(_ROWS, np.int32)
    for row, ids in enumerate(rows):
      tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    losses[group] = float(_loss(target.model, params, tokens, lengths))
  found = {x: loss for x, loss in losses.items() if loss > np.log(size)}
  if not found:
    return []
  listed = ", ".join(
    f"{terminal.escape(x, '')} ({loss:.1f})" for x, loss in found.items()
  )
  return [
    f"random tokens, or a language that the target never saw: {listed} nats a "
    f"token to it, {np.log(size):.1f} if drawn evenly. Drafts do better on "
    "random tokens than on text, by a quarter in throughput, as SPEED-Bench "
    "reports (arXiv:2604.09557)"
  ]


@functools.partial(jax.jit, static_argnames="model")
def _loss(model, params, tokens, lengths):
  """Mean negative log-likelihood of all tokens but the first of each row."""
  batch, size = tokens.shape
  cache = kv.empty(model, params, batch, kv.num_slots(size))
  output, _ = model.apply(params, tokens, cache)
  log_probs = jax.nn.log_softmax(output.logits[:, :-1])
  taken = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
  counted = jnp.arange(1, size)[None] < lengths[:, None]
  return -jnp.sum(taken * counted) / jnp.maximum(jnp.sum(counted), 1)


def _decode_batch(
  decoders: dict[int | str, Decoder], batch: Batch, turn: int, comparable: bool
) -> dict:
  """Decodes a batch with every k and the baseline once; returns its line of
  JSON. Its number, `turn`, rotates who goes first."""
  ways = {
    name: functools.partial(way.complete, strict=False)
    for name, way in decoders.items()
  }
  [done] = runs.interleave(ways, [batch], first_turn=turn)
  comparison = runs.Comparison(decoders, [batch], [done])
  baseline, faults = done[runs.BASELINE], [x.faults for x in done.values()]

  def counted(k: int) -> dict:
    completed = done[k]
    return {
      "k": k,
      "nodes": decoders[k].num_nodes,
      "tokens": completed.num_tokens,
      "seconds": completed.seconds,
      "prefill_seconds": completed.prefill_seconds,
      "stats": {
        name: np.asarray(value).tolist()
        for name, value in vars(completed.stats).items()
      },
      "differences": comparison.differences(k) if comparable else (),
    }

  return {
    "prompts": list(batch.numbers),
    "faults": [*dict.fromkeys(itertools.chain(*faults))],
    "baseline_tokens": baseline.num_tokens,
    "baseline_seconds": baseline.seconds,
    "baseline_prefill_seconds": baseline.prefill_seconds,
    "runs": [counted(k) for k in done if k != runs.BASELINE],
  }


def _faults(lines: Sequence[dict]) -> list[str]:
  return [*itertools.chain(*(line.get("faults", ()) for line in lines))]


def sum_up(
  lines: Sequence[dict], groups: Sequence[str], batch: int, comparable: bool
) -> list[results.Run]:
  """Returns a run for every group and k, in the prompts' order, then for all.

  Groups of which no token was decoded are left out, and lines without any are
  refused.
  """
  decoded = [
    line
    for line in lines
    if line["baseline_tokens"] and all(run["tokens"] for run in line["runs"])
  ]
  if not decoded:
    raise ValueError(_faults(lines)[0])
  by_group = {group: [] for group in dict.fromkeys(groups)}
  for line in decoded:
    by_group[groups[line["prompts"][0]]].append(line)
  by_group["all"] = decoded
  return [
    _run(some, place, group, batch, comparable)
    for group, some in by_group.items()
    if some
    for place in range(len(some[0]["runs"]))
  ]


def _run(lines, place, group, batch, comparable) -> results.Run:
  """Sums up these lines' runs number `place`."""
  parts = [line | line["runs"][place] for line in lines]
  stats = [
    Stats(**{name: np.array(x) for name, x in part["stats"].items()})
    for part in parts
  ]
  identity = None
  if comparable:
    texts = sum(len(part["prompts"]) for part in parts)
    differences = (*itertools.chain(*(part["differences"] for part in parts)),)
    identity = results.Identity(texts, texts - len(differences), differences)
  return results.Run(
    group,
    parts[0]["k"],
    parts[0]["nodes"],
    batch,
    metrics.acceptance(stats),
    metrics.speed_of(parts),
    identity,
  )


def document(
  header: dict,
  runs: Sequence[results.Run],
  lines: Sequence[dict],
  corpus: Corpus,
) -> dict:
  """Returns the document of eval.py."""
  loads = [line["load"] for line in lines if line["load"] is not None]
  return header | {
    "caveats": [*header["caveats"], *_faults(lines)],
    "runs": [run.document() for run in runs],
    "measured": {
      "first": min(line["date"] for line in lines),
      "last": max(line["date"] for line in lines),
      "highest_load": max(loads, default=None),
    },
    "broken_lines": corpus.broken,
    "too_long": corpus.too_long,
  }
