"""Timing passes and generations, and what they are to be believed by.

Invariant: nothing that compiles is timed, everything timed is waited for with
`block_until_ready`, and a time that its bytes forbid is reported.
"""

import contextlib
import dataclasses
import functools
import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import multihost, sampling, sharding, step, traversal
from specdec.benchmark.batches import Batch
from specdec.benchmark.decoder import Decoder
from specdec.noise import Noise, row_keys
from specdec.roofline import hardware
from specdec.types import Model, PyTree, Source

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TOLERANCE = 0.05  # bandwidth itself moves by some percent from run to run
_GROSS = 0.5  # share of its bytes' time below which a time is simply wrong
_TIMED = 0.1  # seconds that a timed program takes at least, roughly


class Impossible(RuntimeError):
  """A measurement that cannot be true."""


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds of something done over and over."""

  median: float
  least: float
  quartiles: tuple[float, float]
  repeats: int


def timing(seconds: Sequence[float]) -> Timing:
  """Sums up."""
  low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
  return Timing(median, min(seconds), (low, high), len(seconds))


def pass_timer(
  model: Model,
  params: PyTree,
  batch: int,
  tokens: int,
  context: int,
  slots: int,
  source: int = 1,
) -> Callable[[], float]:
  """Returns what times one pass of n tokens a row, in seconds, at every call.

  As in decoding, passes follow one another inside one program (so many that it
  runs for some time) and each begins with the argmax of the logits of the one
  before; a pass called from the host by itself costs up to twice as much.

  Args:
    context: committed positions before the pass.
    slots: positions of the cache.
    source: positions that an encoder-decoder's cross-attention reads.
  """
  # Inside jit, a mesh gets its parts and no device all of it.
  make = jax.jit(functools.partial(kv.empty, model), static_argnums=(1, 2))
  length = jnp.full((batch,), source)
  text = Source(jnp.zeros((batch, source), jnp.int32), length)
  cache = make(params, batch, kv.num_slots(slots), text)
  cache = cache.replace(length=jnp.full((batch,), context))

  @functools.partial(jax.jit, donate_argnums=(1, 2))
  def run(params, ids, cache, passes):
    def body(_, carry):
      output, cache = model.apply(params, *carry)
      return sampling.argmax(output.logits), cache

    return jax.lax.fori_loop(0, passes, body, (ids, cache))

  carry = jnp.zeros((batch, tokens), jnp.int32), cache

  def timed(passes: int) -> float:
    nonlocal carry
    begin = time.perf_counter()
    carry = jax.block_until_ready(run(params, *carry, passes))
    return (time.perf_counter() - begin) / passes

  timed(1)
  passes = max(1, round(_TIMED / min(timed(1), timed(1))))
  passes = int(multihost.agree(passes))
  timed(passes)
  return functools.partial(timed, passes)


class Turns(NamedTuple):
  """Several passes, timed in turns with the memory's bandwidth.

  Attributes:
    seconds: [passes, turns].
    rates: [turns] B/s of a device, read just before.
  """

  seconds: np.ndarray
  rates: np.ndarray


def time_passes(
  timers: Sequence[Callable[[], float]], params: PyTree, repeats: int
) -> Turns:
  """Times several passes of `pass_timer` in turns, with the memory's bandwidth
  at the size of these weights.

  A machine whose speed comes and goes is thus the same one for all of them. The
  order is another one in every turn, as what ran before a pass slows it.
  """
  read = bandwidth_timer(params)
  rates, seconds = [], np.zeros((len(timers), repeats))
  for turn in range(repeats):
    rates.append(read())
    order = np.random.default_rng(turn).permutation(len(timers))
    timers[order[0]]()  # the first program after reading is slow for a moment
    for i in order:
      seconds[i, turn] = timers[i]()
  return Turns(seconds, np.array(rates))


def round_timer(
  decoder: Decoder, rows: Sequence[Sequence[int]]
) -> Callable[[], float]:
  """Returns what times rounds with all rows at work: seconds of one, a call.

  It keeps a prefilled state, and times on copies of it, as often as it takes
  to have timed rounds for a while.
  """
  most = decoder.max_new_tokens // decoder.num_nodes
  if most < 1:
    raise ValueError(
      f"{decoder.max_new_tokens} new tokens have no room for a round of "
      f"{decoder.num_nodes}"
    )
  first = decoder.start(Batch(rows, range(len(rows))))

  def once() -> float:
    state = jax.block_until_ready(jax.tree.map(jnp.copy, first))
    begin = time.perf_counter()
    state = decoder.run(state, 0)  # what a call costs by itself
    middle = time.perf_counter()
    decoder.run(state, most)
    end = time.perf_counter()
    return max(end - middle - (middle - begin), 0.5 * (end - middle)) / most

  once()
  count = max(1, round(_TIMED / (most * min(once(), once()))))
  count = int(multihost.agree(count))
  return lambda: sum(once() for _ in range(count)) / count


def forget_programs() -> None:
  """Drops compiled programs that nobody holds.

  Linux gives a process 65,530 memory maps, and on a CPU every program takes
  many: a long run that keeps all of them ends in a segmentation fault.
  """
  gc.collect()
  jax.clear_caches()


@dataclasses.dataclass
class Compilations:
  """Programs compiled by XLA's backend, and how long that took."""

  count: int = 0
  seconds: float = 0.0


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
  """Counts what is compiled inside the block."""
  compiled, open_ = Compilations(), True

  def listen(event: str, seconds: float, **_) -> None:
    if open_ and event == _COMPILED:
      compiled.count += 1
      compiled.seconds += seconds

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield compiled
  finally:
    open_ = False  # listeners cannot be taken back one by one


def loop_memory(decoder: Decoder) -> int:
  """Bytes a device holds while this loop runs: weights, caches, temporaries."""
  memory = decoder.program().memory_analysis()
  return (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )


def peak_memory() -> int | None:
  """Bytes that the device held at most so far; of the process, on a CPU.

  The largest is often what was done before decoding: loading, measuring this
  machine.
  """
  device = jax.local_devices()[0]
  if device.platform != "cpu":
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bandwidth_of(params: PyTree) -> float:
  """B/s at which as many bytes as these weights have can be read, now."""
  return hardware.measure_bandwidth(_read_size(params), repeats=15)


def bandwidth_timer(params: PyTree) -> Callable[[], float]:
  """Returns what measures that bandwidth anew at every call, in B/s."""
  return hardware.bandwidth_timer(_read_size(params))


def _read_size(params: PyTree) -> int:
  """Bytes to read for the bandwidth that bounds products of these weights."""
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  # Of less, it is mostly the products' beginning that would be timed.
  return min(max(size, 4 << 20), 1 << 30)


def check_possible(
  what: str, seconds: float, size: int, bandwidth: float
) -> str | None:
  """Compares a time with the time that moving its bytes takes.

  Args:
    size: bytes.
    bandwidth: B/s, the best that was measured for a working set of that size.

  Returns:
    A sentence where it is shorter by more than a tolerance.

  Raises:
    Impossible: it is shorter than half of that, so nothing can be read off.
  """
  least = size / bandwidth
  if seconds >= (1 - _TOLERANCE) * least:
    return None
  sentence = (
    f"{what} took {seconds * 1e3:.4g} ms, and moving its {size / 1e6:.4g} "
    f"MB takes {least * 1e3:.4g} ms at the {bandwidth / 1e9:.3g} GB/s "
    "measured here: one of the two was measured wrongly"
  )
  if seconds < _GROSS * least:
    raise Impossible(sentence)
  return sentence


class Limit:
  """The bandwidth that times of a model's passes must not beat.

  It is measured at the weights' size, and once more before a time is doubted:
  the machine may have been busy the first time.
  """

  def __init__(self, params: PyTree):
    self._params = params
    leaf = jax.tree.leaves(params)[0]
    self._devices = len(leaf.sharding.device_set)
    self.bandwidth = self._measured()  # B/s, all of them

  def _measured(self) -> float:
    return float(multihost.agree(self._devices * bandwidth_of(self._params)))

  def check(self, what: str, seconds: float, size: int) -> str | None:
    """Compares as `check_possible` does, alike on all processes."""
    seconds = float(multihost.agree(seconds))
    with contextlib.suppress(Impossible):
      if check_possible(what, seconds, size, self.bandwidth) is None:
        return None
    self.bandwidth = max(self.bandwidth, self._measured())
    return check_possible(what, seconds, size, self.bandwidth)


def time_acceptance(decoder: Decoder, repeats: int) -> Timing:
  """Warp and acceptance of one round by its rule, apart from it.

  The drafter drafts after a text of one token; the target's logits are random
  but for the draft tokens, which they favour, so that about every depth is
  walked.
  """
  spec, vocab_size = decoder.drafter.spec, decoder.target.vocab_size
  settings = decoder.settings(decoder.batch)
  rows, key = jnp.arange(decoder.batch), jax.random.key(0)
  state = decoder.start(Batch([[1]] * decoder.batch, range(decoder.batch)))
  place = decoder.places.target if decoder.places else sharding.anywhere

  @jax.jit
  def drafted(params, state):
    parts = decoder.target, decoder.drafter, decoder.rule
    draft, _ = step.draft_step(*parts, params, state)
    parents = traversal.parents_of(spec.with_tree(draft))
    count = jnp.full_like(draft.count, spec.max_nodes)  # matched or not
    draft = draft._replace(parents=parents, count=count, resume=None)
    logits = 3 * jax.random.normal(key, (*draft.tokens.shape, vocab_size))
    favoured = rows[:, None], draft.parents[:, 1:], draft.tokens[:, 1:]
    logits = logits.at[favoured].add(20.0)
    return draft, place(logits, "rows", None, "vocab")

  draft, logits = drafted(decoder.params, state)

  @jax.jit
  def accept(logits, draft, length):
    coupled = decoder.rule.traversal == "coupled"
    sampled = jnp.any(settings.temperature > 0)
    noise = Noise(row_keys(key, rows), length, vocab_size, coupled, sampled)
    return step.traverse_draft(
      decoder.rule,
      spec.with_tree(draft),
      logits,
      sampling.warp(logits, settings),
      noise,
      spec.max_depth,
    )

  seconds = []
  for _ in range(3 + repeats):
    begin = time.perf_counter()
    jax.block_until_ready(accept(logits, draft, state.length))
    seconds.append(time.perf_counter() - begin)
  return timing(seconds[3:])
