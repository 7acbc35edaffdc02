"""Prompts that arrive and leave: a queue, served by the rows of one state.

Rows that are done are given to prompts that wait, so that the batch stays full
while there is work. Goodput is committed tokens per second from the beginning
to the last token, prefill included: what a drafter really gains under a load.
Invariant: nothing here knows how tokens are drafted, and the baseline is served
by the very same code.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import decode, slots
from specdec.benchmark.batches import Batch, check_finite
from specdec.benchmark.decoder import Decoder
from specdec.inputs import Inputs, checked
from specdec.types import DecodeState, Stats

_WARM = 8  # new tokens of each text that is decoded to warm up


class Request(NamedTuple):
  """A prompt and when it comes."""

  number: int  # names the noise of its text
  ids: Sequence[int]
  arrival: float  # seconds after the first may come
  new_tokens: int  # at most


class Answer(NamedTuple):
  """What became of a request; times are seconds on the clock of `arrival`."""

  request: Request
  tokens: list[int]  # new ones
  admitted: float  # when its prefill began
  first: float  # when its first token was seen
  finished: float
  stats: Stats  # NumPy, of one row; `widths` are zero

  @property
  def latency(self) -> float:
    """Seconds from its arrival to its last token."""
    return self.finished - self.request.arrival

  @property
  def first_latency(self) -> float:
    """Seconds from its arrival to its first token."""
    return self.first - self.request.arrival


@dataclasses.dataclass(frozen=True)
class Served:
  """A queue that was served: its answers in the order of their numbers."""

  answers: list[Answer]
  seconds: float  # until the last token
  rounds: int  # each one pass of the target over all rows
  refills: int  # each one prefill
  rows: int  # of the batch

  @property
  def num_tokens(self) -> int:
    """New tokens of all answers."""
    return sum(len(one.tokens) for one in self.answers)

  @property
  def goodput(self) -> float:
    """Committed tokens per second."""
    return self.num_tokens / self.seconds

  @property
  def occupancy(self) -> float:
    """Share of rows that were at work, over rounds."""
    work = sum(int(one.stats.rounds.sum()) for one in self.answers)
    return work / (self.rounds * self.rows)

  @property
  def texts(self) -> list[list[int]]:
    """New token ids, in the order of the requests' numbers."""
    return [one.tokens for one in self.answers]


class _Held(NamedTuple):
  """Who is in a row."""

  request: Request
  admitted: float
  first: float | None  # None: no token was seen yet


@dataclasses.dataclass
class Server:
  """Serves queues with the rows of one decoder.

  The host looks at the state when a row is done, after the first round of a
  prompt, and, while rows are empty and prompts are still to come, after every
  few rounds. Its two programs are compiled once, whatever the requests are.

  Attributes:
    decoder: batch, prompt_size and max_new_tokens are what a row has room for.
    together: prompts of one prefill, R; where fewer wait, it costs as much.
    every: rounds between looks at the queue while rows are empty.
    clock, sleep: of seconds.
  """

  decoder: Decoder
  together: int = 1
  every: int = 4
  clock: Callable[[], float] = time.perf_counter
  sleep: Callable[[float], None] = time.sleep

  def __post_init__(self):
    if not 1 <= self.together <= self.decoder.batch:
      raise ValueError(
        f"{self.together} prompts prefilled together; it must be in "
        f"1..{self.decoder.batch}, the rows of the batch"
      )
    if self.every < 1:
      raise ValueError(f"every = {self.every}; it must be >= 1")
    if self.decoder.places:
      raise ValueError(
        "rows arrive and leave on one device alone: leave the mesh out"
      )
    self._arriving = dataclasses.replace(self.decoder, batch=self.together)

  @property
  def _parts(self) -> tuple:
    one = self.decoder
    return one.target, one.drafter, one.rule, one.params

  def check(self, requests: Sequence[Request]) -> None:
    """Refuses requests that cannot be served, before any work."""
    if not requests:
      raise ValueError("there are no prompts to serve")
    numbers = collections.Counter(one.number for one in requests)
    if (often := numbers.most_common(1)[0])[1] > 1:
      raise ValueError(
        f"{often[1]} requests have the number {often[0]}; each needs its own"
      )
    decoder = self.decoder
    for number, ids, arrival, new_tokens in requests:
      if not 1 <= len(ids) <= decoder.prompt_size:
        raise ValueError(
          f"prompt {number} has {len(ids)} tokens; a row has room for 1 to "
          f"{decoder.prompt_size}"
        )
      if not 1 <= new_tokens <= decoder.max_new_tokens:
        raise ValueError(
          f"prompt {number} asks for {new_tokens} new tokens; a row has room "
          f"for 1 to {decoder.max_new_tokens}"
        )
      if not 0 <= arrival < math.inf:
        raise ValueError(
          f"prompt {number} arrives after {arrival} seconds; it must be a "
          "number >= 0"
        )
    all_of_them = dataclasses.replace(decoder, batch=len(requests))
    inputs = _inputs(all_of_them, requests)
    size = decoder.target.vocab_size
    checked(inputs, decoder.eos_ids, decoder.max_length, size)

  def serve(self, requests: Sequence[Request]) -> Served:
    """Answers every request once; raises ValueError where a distribution is not
    finite."""
    self.check(requests)
    order = sorted(requests, key=lambda one: (one.arrival, one.number))
    queue = collections.deque(order)
    held: list[_Held | None] = [None] * self.decoder.batch
    answers: list[Answer] = []
    refills = 0
    state = jax.block_until_ready(self.decoder.start(Batch([], [])))
    begin = self.clock()
    now = 0.0
    while queue or any(held):
      now = self.clock() - begin
      free = [row for row, one in enumerate(held) if one is None]
      some: list[Request] = []
      most = min(len(free), self.together)
      while queue and len(some) < most and queue[0].arrival <= now:
        some.append(queue.popleft())
      if some:
        state = self._refill(state, free, some)
        refills += 1
        for row, request in zip(free, some):
          held[row] = _Held(request, now, None)
      elif not any(held):
        self.sleep(queue[0].arrival - now)
      else:
        state = self._run(state, held, bool(queue))
        done, length = jax.device_get((state.done, state.length))
        now = self.clock() - begin
        for row, one in enumerate(held):
          if one is not None and one.first is None:
            held[row] = one._replace(first=now)
        answers += self._leave(state, held, done, length, now)
    rounds = int(np.sum(jax.device_get(state.stats.widths)))
    answers.sort(key=lambda one: one.request.number)
    return Served(answers, now, rounds, refills, self.decoder.batch)

  def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
    """Compiles both programs and runs them.

    As `Decoder.warm_up` does, a text of one token over and over, which invites
    every drafter, is decoded as well as the prompts.
    """
    inviting = [1] * min(self.decoder.prompt_size, 16)
    some = [inviting, *prompts[: self.decoder.batch]]
    new = min(_WARM, self.decoder.max_new_tokens)
    self.serve([Request(i, ids, 0.0, new) for i, ids in enumerate(some)])

  def _refill(
    self, state: DecodeState, free: Sequence[int], some: Sequence[Request]
  ) -> DecodeState:
    """Puts requests into the first rows that are free; donates the state."""
    rows = np.full((self.together,), self.decoder.batch, np.int32)
    rows[: len(some)] = free[: len(some)]
    inputs = jax.tree.map(jnp.asarray, _inputs(self._arriving, some))
    return slots.refill(*self._parts, state, jnp.asarray(rows), inputs)

  def _run(
    self, state: DecodeState, held: Sequence[_Held | None], more: bool
  ) -> DecodeState:
    """Runs until another row is done or, where rows are empty and `more`
    prompts are to come, for `every` rounds; donates the state."""
    empty = held.count(None)
    rounds = decode.MAX_ROUNDS
    if more and empty:
      rounds = self.every
    if any(one is not None and one.first is None for one in held):
      rounds = 1  # its first token is due
    limits = np.int32(rounds), np.int32(empty + 1)
    eos_ids = np.asarray(self.decoder.eos_ids, np.int32)
    return decode.run(
      *self._parts, state, *map(jnp.asarray, (eos_ids, *limits))
    )

  def _leave(self, state, held, done, length, now: float) -> list[Answer]:
    """Takes the rows that are done, with what their states count."""
    leaving = [row for row, x in enumerate(held) if x is not None and done[row]]
    if not leaving:
      return []
    check_finite(state, [x.request.number if x else 0 for x in held])
    tokens, stats = jax.device_get((state.tokens, state.stats))
    widths, answers = np.zeros_like(stats.widths), []

    for row in leaving:
      request, admitted, first = held[row]
      begin = self.decoder.num_given(request.ids)
      text = tokens[row, begin : length[row]].tolist()
      counts = jax.tree.map(lambda x, row=row: x[row : row + 1].copy(), stats)
      counts = counts.replace(widths=widths)
      answers.append(Answer(request, text, admitted, first, now, counts))
      held[row] = None
    return answers


def _inputs(decoder: Decoder, some: Sequence[Request]) -> Inputs:
  """The inputs of at most as many requests as the decoder has rows."""
  rows, numbers = [one.ids for one in some], [one.number for one in some]
  inputs = decoder.inputs(Batch(rows, numbers))
  for i, one in enumerate(some):
    inputs.limit[i] = decoder.num_given(one.ids) + one.new_tokens
  return inputs


def requests_of(
  prompts: Sequence[Sequence[int]],
  count: int,
  most: int,
  least: int | None = None,
  rate: float | None = None,
  seed: int = 0,
) -> list[Request]:
  """Returns requests for prompts, taken again and again until there are enough.

  Gaps between arrivals are exponential and scale with 1 / rate: another rate is
  the same sequence of arrivals, faster or slower.

  Args:
    most, least: bounds, both included, of the new tokens that each asks for,
      drawn uniformly; least None: `most` for all.
    rate: requests a second; None: all are there from the beginning.
  """
  if not prompts:
    raise ValueError("there are no prompts to serve")
  if count < 1:
    raise ValueError(f"{count} requests; there must be at least 1")
  least = most if least is None else least
  if not 1 <= least <= most:
    raise ValueError(
      f"{least} to {most} new tokens; it must be 1 <= least <= most"
    )
  if rate is not None and not 0 < rate < math.inf:
    raise ValueError(f"{rate} requests a second; it must be a number > 0")
  rng = np.random.default_rng(seed)
  gaps = rng.exponential(size=count)
  new_tokens = rng.integers(least, most + 1, size=count).tolist()
  arrival = np.zeros(count) if rate is None else np.cumsum(gaps) / rate
  return [
    Request(i, prompts[i % len(prompts)], float(arrival[i]), new_tokens[i])
    for i in range(count)
  ]
