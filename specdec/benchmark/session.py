"""Batches of one shape, decoded autoregressively or speculatively and timed
alike.

Invariant: both ways run the same loop in the same pieces, so that what is
timed differs in the drafting alone; prefill, compilation and printing are
outside the clock.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec import decode, multihost, programs, sampling
from specdec.benchmark.answer import Answer
from specdec.checkpoints import Tokenizer
from specdec.noise import Noise, row_keys
from specdec.types import (
  NO_FAULT,
  TARGET_FAULT,
  AcceptanceRule,
  DecodeState,
  Drafter,
  Model,
  Params,
  Sampling,
  Stats,
)
from specdec.utils.terminal import Painter

PROMPT_STEP = 64  # prompt buffers are multiples of it: few shapes to compile


def prompt_size(prompts: Sequence[Sequence[int]]) -> int:
  """P, the buffer that holds every one of these prompts."""
  longest = max(len(prompt) for prompt in prompts)
  return -(-longest // PROMPT_STEP) * PROMPT_STEP


def _counts(stats: Stats, count: int) -> Stats:
  """The first rows' counts, on the host."""
  stats = jax.tree.map(multihost.whole, stats)
  own = jax.tree.map(lambda x: x[:count], stats)
  return own.replace(widths=stats.widths)


def check_finite(state: DecodeState, numbers: Sequence[int]) -> None:
  """Refuses rows that end where a distribution is not finite.

  Raises:
    ValueError: names the first of them.
  """
  faults = faults_of(state, numbers)
  if faults:
    raise ValueError(faults[0])


def faults_of(state: DecodeState, numbers: Sequence[int]) -> list[str]:
  """Returns a sentence for each row that ends where a distribution is not
  finite.

  Args:
    numbers: the prompts' of the first rows; the others are not looked at.
  """
  fault, length = multihost.whole(state.fault), multihost.whole(state.length)
  return [
    f"prompt {number} ends at token {length[i]} of prompt and output, where "
    f"the {'target' if fault[i] == TARGET_FAULT else 'draft'}'s probabilities "
    "are not finite: its weights hold or make NaN or infinity (in bfloat16 try "
    "--dtype=float32)"
    for i, number in enumerate(numbers)
    if fault[i] != NO_FAULT
  ]


class Completed(NamedTuple):
  """One batch, decoded without a look in between."""

  texts: list[list[int]]  # new token ids of each row
  seconds: float  # of decoding rounds alone
  prefill_seconds: float
  stats: Stats  # NumPy, of the rows that were asked for
  faults: list[str]  # which texts ended where a distribution was not finite


class Decoded(NamedTuple):
  """One batch."""

  answers: list[Answer]
  seconds: float  # of decoding rounds alone
  prefill_seconds: float
  stats: Stats  # NumPy, of the rows that were asked for
  faults: list[str]  # which texts ended where a distribution was not finite

  @property
  def texts(self) -> list[list[int]]:
    """New token ids of each row."""
    return [answer.ids for answer in self.answers]


@dataclasses.dataclass
class Session:
  """Models, drafter and rule of one run, and the shape it compiles.

  With `places` it runs on a mesh; target and drafter were made for them.
  """

  target: Model
  drafter: Drafter
  rule: AcceptanceRule
  params: Params
  key: jax.Array
  batch: int
  prompt_size: int
  max_new_tokens: int
  eos_ids: Sequence[int] = ()
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  places: programs.Places | None = None
  _programs: dict[bool, jax.stages.Compiled] = dataclasses.field(
    default_factory=dict, repr=False
  )
  _on_mesh: dict[bool, programs.Programs] = dataclasses.field(
    default_factory=dict, repr=False
  )

  def __post_init__(self):
    decode.check_pair(self.drafter.spec, self.rule)

  @property
  def max_length(self) -> int:
    """L, prompt and output together."""
    return self.prompt_size + self.max_new_tokens

  def _parts(self, baseline: bool):
    if baseline:
      return self.target, decode.NO_DRAFTER, decode.NO_DRAFT_RULE
    return self.target, self.drafter, self.rule

  def settings(self, batch: int) -> Sampling:
    """Sampling settings for so many rows."""
    return sampling.settings(batch, self.temperature, self.top_k, self.top_p)

  def start(
    self, rows: Sequence[Sequence[int]], numbers: Sequence[int], baseline: bool
  ) -> DecodeState:
    """Prefill of rows, whose prompts' numbers name their noise.

    Places that the rows leave empty hold a row that is done.
    """
    prompt = np.zeros((self.batch, self.prompt_size), np.int32)
    length = np.ones((self.batch,), np.int32)
    limit = np.ones((self.batch,), np.int32)
    index = np.zeros((self.batch,), np.int32)
    index[: len(rows)] = list(numbers)
    for i, ids in enumerate(rows):
      prompt[i, : len(ids)] = ids
      length[i] = len(ids)
      limit[i] = len(ids) + self.max_new_tokens
    inputs = programs.Inputs(
      prompt, length, self.key, self.settings(self.batch), limit, index
    )
    if self.places:
      made = self._deployment(baseline, inputs)
      where = made.inputs._replace(key=None)
      given = jax.tree.map(multihost.put, inputs._replace(key=None), where)
      return made.start(self.params, given._replace(key=self.key))
    inputs = jax.tree.map(jnp.asarray, inputs)
    return decode.start(
      *self._parts(baseline),
      self.params,
      inputs.prompt,
      inputs.prompt_length,
      inputs.key,
      max_length=self.max_length,
      sampling=inputs.sampling,
      limit=inputs.limit,
      index=inputs.index,
    )

  def _deployment(
    self, baseline: bool, inputs: programs.Inputs | None = None
  ) -> programs.Programs:
    if baseline not in self._on_mesh:
      self._on_mesh[baseline] = programs.on_mesh(
        *self._parts(baseline),
        self.params,
        inputs,
        self.max_length,
        self.places,
      )
    return self._on_mesh[baseline]

  def run(
    self, state: DecodeState, baseline: bool, max_rounds: int
  ) -> DecodeState:
    """At most so many rounds; waits for them."""
    return jax.block_until_ready(
      self.program(baseline, state)(
        self.params, state, self._eos_ids, self._whole(np.int32(max_rounds))
      )
    )

  @property
  def _eos_ids(self) -> jax.Array:
    return self._whole(np.asarray(self.eos_ids, np.int32))

  def _whole(self, x: np.ndarray) -> jax.Array:
    """On every device."""
    if self.places is None:
      return jnp.asarray(x)
    return multihost.put(x, self.places.target.sharding(()))

  def program(
    self, baseline: bool, state: DecodeState | None = None
  ) -> jax.stages.Compiled:
    """The compiled loop, whose `memory_analysis` says what it needs."""
    if baseline not in self._programs:
      state = self.start([], [], baseline) if state is None else state
      given = self.params, state, self._eos_ids, self._whole(np.int32(0))
      if self.places:
        lowered = self._deployment(baseline).run.lower(*given)
      else:
        lowered = decode.run.lower(*self._parts(baseline), *given)
      self._programs[baseline] = lowered.compile()
    return self._programs[baseline]

  def share_baseline(self, other: "Session") -> None:
    """Takes over another session's plain loop; same shapes, one target."""
    self._programs[True] = other.program(True)

  def compile(self, baseline: bool) -> float:
    """Compiles prefill and loop of one way; seconds that it took."""
    begin = time.perf_counter()
    self.program(baseline)
    return time.perf_counter() - begin

  def warm_up(self, rows: Sequence[Sequence[int]]) -> float:
    """Compiles every program, then runs a few rounds of each.

    The first pass of each width sets up kernels (0.6 s for SmolLM2 on a CPU),
    so a text of one token over and over, which invites every drafter, is
    decoded as well as the rows.

    Returns:
      Seconds that compiling took.
    """
    seconds = self.compile(False) + self.compile(True)
    inviting = [[1] * min(self.prompt_size, 16)]
    for prompts in (inviting, rows):
      for baseline in (False, True):
        state = self.start(prompts, range(len(prompts)), baseline)
        self.run(state, baseline, 8)
    return seconds

  def first_rounds(
    self, rows: Sequence[Sequence[int]], max_rounds: int
  ) -> Stats:
    """What became of the draft tokens of at most so many rounds."""
    state = self.start(rows, range(len(rows)), False)
    state = self.run(state, False, max_rounds)
    check_finite(state, range(len(rows)))
    return _counts(state.stats, len(rows))

  def complete(
    self,
    rows: Sequence[Sequence[int]],
    numbers: Sequence[int],
    baseline: bool,
    strict: bool = True,
  ) -> Completed:
    """Decodes a batch in one program: what a speed should be taken from.

    Args:
      strict: refuses texts that end where a distribution is not finite.

    Raises:
      ValueError: names the first of them.
    """
    begin = time.perf_counter()
    state = jax.block_until_ready(self.start(rows, numbers, baseline))
    middle = time.perf_counter()
    state = self.run(state, baseline, decode.MAX_ROUNDS)
    seconds = time.perf_counter() - middle
    faults = faults_of(state, numbers)
    if faults and strict:
      raise ValueError(faults[0])
    tokens, length = (
      multihost.whole(state.tokens),
      multihost.whole(state.length),
    )
    texts = [
      tokens[i, len(ids) : length[i]].tolist() for i, ids in enumerate(rows)
    ]
    stats = _counts(state.stats, len(rows))
    return Completed(texts, seconds, middle - begin, stats, faults)

  def decode(
    self,
    rows: Sequence[Sequence[int]],
    numbers: Sequence[int],
    baseline: bool,
    tokenizer: Tokenizer | None,
    stops: Sequence[str] = (),
    painter: Painter | None = None,
    every: int = 8,
  ) -> Decoded:
    """Decodes a batch; with a painter, prints row 0 as it comes.

    Args:
      every: rounds between looks at the text (for stop strings, printing).
    """
    begin = time.perf_counter()
    state = jax.block_until_ready(self.start(rows, numbers, baseline))
    prefill = time.perf_counter() - begin
    answers = [Answer(tokenizer, stops) for _ in rows]
    seen, seconds = [len(ids) for ids in rows], 0.0
    while not np.all(multihost.whole(state.done)):
      begin = time.perf_counter()
      state = self.run(state, baseline, every)
      seconds += time.perf_counter() - begin
      length = multihost.whole(state.length)
      columns = [
        multihost.whole(column)
        for column in (
          state.tokens,
          state.origin,
          state.log_probs,
          state.draft_log_probs,
        )
      ]
      for i, answer in enumerate(answers):
        new = slice(seen[i], length[i])
        answer.push(*(column[i, new] for column in columns))
        seen[i] = length[i]
      if painter:
        answers[0].show(painter, ended=False)
      stopped = np.zeros((self.batch,), bool)
      stopped[: len(rows)] = [answer.stopped for answer in answers]
      if stopped.any():
        done = multihost.whole(state.done) | stopped
        state = state.replace(done=multihost.put(done, state.done.sharding))
    for answer in answers:
      answer.finish()
    if painter:
      answers[0].show(painter)
    stats = _counts(state.stats, len(rows))
    return Decoded(answers, seconds, prefill, stats, faults_of(state, numbers))

  def first_difference(
    self,
    prompt: Sequence[int],
    ours: Sequence[int],
    baseline: Sequence[int],
    index: int,
  ) -> str:
    """Where a text leaves autoregressive decoding's, and how near to a tie that
    was.
    """
    both = list(zip(ours, baseline))
    at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    # As many equal rows as a mesh must have.
    rows = self.places.target.ways("rows") if self.places else 1
    ids = np.asarray([[*prompt, *baseline[:at]]] * rows)
    position = jnp.asarray([ids.shape[1]])

    def last(params, ids):
      cache = self.target.init_cache(rows, ids.shape[1] + 1)
      return self.target.apply(params, ids, cache)[0].logits[:1, -1]

    score = jnp.asarray(multihost.whole(jax.jit(last)(self.params.target, ids)))
    if self.temperature > 0:
      noise = Noise(
        row_keys(self.key, jnp.asarray([index])),
        position,
        self.target.vocab_size,
        coupled=True,
      )
      score = sampling.warp(score, self.settings(1))
      score += noise.at_position(position)
    second, best = np.sort(np.asarray(score[0]))[-2:]
    return (
      f"prompt {index} leaves it at new token {at}, where the two likeliest "
      f"tokens are {best - second:.2g} apart"
    )
