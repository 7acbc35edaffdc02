"""A way of decoding as a value: models, drafter, rule, and one batch shape.

The autoregressive baseline is a way like any other: `Decoder.baseline()`, whose
drafter proposes nothing. All ways run the same loop in the same pieces, so what
is timed differs in the drafting alone; prefill, compilation and printing are
outside the clock.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specdec import cache as kv
from specdec import decode, multihost, sampling, sharding
from specdec.benchmark.batches import (
  Batch,
  Completed,
  NewTokens,
  batches_of,
  check_finite,
  faults_of,
  stats_of,
)
from specdec.checkpoints import Tokenizer
from specdec.types import (
  UNBOUNDED,
  UNKNOWN_COST,
  AcceptanceRule,
  DecodeState,
  Drafter,
  DrafterCost,
  Model,
  Outcomes,
  Params,
  Sampling,
  Source,
  Stats,
)


@dataclasses.dataclass
class Decoder:
  """One way of decoding batches of one shape.

  The prompts of an encoder-decoder are what its encoder reads; its output
  begins with `start_token`. With `places` it runs on a mesh; target and drafter
  were built for them.
  Programs are compiled when first needed and kept. Without `runs_prompts` it
  begins after positions of which the cache holds nothing: for the time that
  rounds take at long contexts, and for drafters without a state.
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
  places: sharding.Places | None = None
  tokenizer: Tokenizer | None = None
  start_token: int = 0
  runs_prompts: bool = True

  def __post_init__(self):
    decode.check_pair(self.drafter.spec, self.rule)
    if self.places:
      _check_bits(self.params)
    self._program: jax.stages.Compiled | None = None
    self.is_warm = False  # every program was compiled and run

  def baseline(self) -> "Decoder":
    """Returns the autoregressive way of decoding the same batches."""
    return dataclasses.replace(
      self, drafter=decode.NO_DRAFTER, rule=decode.NO_DRAFT_RULE
    )

  @property
  def num_nodes(self) -> int:
    """N, tokens that the target verifies in a full round."""
    return self.drafter.spec.max_nodes

  @property
  def drafter_cost(self) -> DrafterCost:
    """What the drafter holds: as it states, or as its weights and state are."""
    if self.drafter.cost is not None and self.drafter.cost.is_complete:
      return self.drafter.cost
    state = jax.eval_shape(lambda: self.start(Batch([], []))).draft_state
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return dataclasses.replace(
      UNKNOWN_COST,
      weight_bytes=sum(x.nbytes for x in jax.tree.leaves(self.params.draft)),
      row_bytes=size / self.batch,
      position_bytes=0.0,
    )

  @property
  def max_length(self) -> int:
    """L, prompt and output together; of an encoder-decoder the output."""
    return self.max_new_tokens + (1 if self.has_encoder else self.prompt_size)

  @property
  def has_encoder(self) -> bool:
    """Whether the target is an encoder-decoder."""
    return self.target.encode is not None

  def for_timing(self, runs_prompts: bool = True) -> "Decoder":
    """Returns it with texts of one length, which no token ends.

    An encoder-decoder's texts keep their ends, past which it has nothing to
    write.
    """
    eos_ids = self.eos_ids if self.has_encoder else ()
    return dataclasses.replace(self, eos_ids=eos_ids, runs_prompts=runs_prompts)

  def num_given(self, ids: Sequence[int]) -> int:
    """Returns the tokens in front of a prompt's output."""
    return 1 if self.has_encoder else len(ids)

  @functools.cached_property
  def num_slots(self) -> int:
    """Positions of the target's cache, all of which attention reads; without
    attention those of a text."""
    slots = self.start(Batch([[1]], [0])).target_cache.num_slots
    return slots if slots < UNBOUNDED else self.max_length

  def settings(self, batch: int) -> Sampling:
    """Returns the sampling settings of so many rows."""
    return sampling.settings(batch, self.temperature, self.top_k, self.top_p)

  def inputs(self, batch: Batch) -> decode.Inputs:
    """Returns what decoding begins with, in NumPy; rows that the batch leaves
    empty are done from the start."""
    text = np.zeros((self.batch, self.prompt_size), np.int32)
    size, limit = np.ones((2, self.batch), np.int32)
    index = np.zeros((self.batch,), np.int32)
    index[: len(batch.rows)] = list(batch.numbers)
    for i, ids in enumerate(batch.rows):
      text[i, : len(ids)], size[i] = ids, len(ids)
      limit[i] = self.num_given(ids) + self.max_new_tokens
    prompt, length, source = text, size, None
    if self.has_encoder:
      source = Source(text, size)
      prompt = np.full_like(text[:, :1], self.start_token)
      length = np.ones_like(size)
    settings = self.settings(self.batch)
    return decode.Inputs(
      prompt, length, self.key, settings, limit, index, source
    )

  def start(self, batch: Batch) -> DecodeState:
    """Prefills a batch."""
    inputs = self.inputs(batch)
    if self.runs_prompts:
      return self._start(inputs)
    first = np.ones_like(inputs.prompt_length)
    state = self._start(inputs._replace(prompt_length=first))
    if state.draft_state is not None:
      raise ValueError("this drafter has a state, which comes of the prompt")
    moved = inputs.prompt_length - first
    cache = kv.lengthened(state.target_cache, moved)
    return state.replace(length=state.length + moved, target_cache=cache)

  def _start(self, inputs: decode.Inputs) -> DecodeState:
    if self.places:
      programs = self._mesh_programs
      where = programs.inputs._replace(key=None)
      inputs = jax.tree.map(multihost.put, inputs._replace(key=None), where)
      return programs.start(self.params, inputs._replace(key=self.key))
    inputs = jax.tree.map(jnp.asarray, inputs)._asdict()
    length = self.max_length
    return decode.start(*self._parts, self.params, max_length=length, **inputs)

  @property
  def _parts(self) -> tuple[Model, Drafter, AcceptanceRule]:
    return self.target, self.drafter, self.rule

  @functools.cached_property
  def _mesh_programs(self) -> decode.Programs:
    inputs = self.inputs(Batch([], []))
    length = self.max_length
    return decode.on_mesh(
      *self._parts, self.params, inputs, length, self.places
    )

  def run(self, state: DecodeState, max_rounds: int) -> DecodeState:
    """Runs at most so many rounds and waits for them; donates the state."""
    program = self.program(state)
    return jax.block_until_ready(
      program(self.params, state, *self._stops(max_rounds))
    )

  def _stops(self, max_rounds: int) -> list[jax.Array]:
    """Returns eos_ids and max_rounds, on every device."""
    arrays = np.asarray(self.eos_ids, np.int32), np.int32(max_rounds)
    if self.places is None:
      return [*map(jnp.asarray, arrays)]
    whole = self.places.target.sharding(())
    return [multihost.put(x, whole) for x in arrays]

  def program(self, state: DecodeState | None = None) -> jax.stages.Compiled:
    """Returns the compiled loop; its `memory_analysis` has its bytes."""
    if self._program is None:
      state = self.start(Batch([], [])) if state is None else state
      arguments = self.params, state, *self._stops(0)
      if self.places:
        lowered = self._mesh_programs.run.lower(*arguments)
      else:
        lowered = decode.run.lower(*self._parts, *arguments)
      self._program = lowered.compile()
    return self._program

  def compile(self) -> float:
    """Compiles prefill and loop; returns the seconds that it took."""
    begin = time.perf_counter()
    self.program()
    return time.perf_counter() - begin

  def warm_up(self, rows: Sequence[Sequence[int]]) -> float:
    """Compiles everything, then runs a few rounds of each program, once.

    The first pass of each width sets up kernels (0.6 s for SmolLM2 on a CPU),
    so a text of one token over and over, which invites every drafter, is
    decoded as well as the rows.

    Returns:
      Seconds that compiling took.
    """
    if self.is_warm:
      return 0.0
    seconds = self.compile()
    inviting = [[1] * min(self.prompt_size, 16)]
    for prompts in (inviting, rows):
      self.run(self.start(Batch(prompts, range(len(prompts)))), 8)
    self.is_warm = True
    return seconds

  def encode(self, prompts: Sequence[str | Sequence[int]]) -> list[Batch]:
    """Encodes texts, takes token ids as they are, and cuts batches; refuses
    prompts that are empty or longer than the buffer."""
    rows = []
    for number, prompt in enumerate(prompts):
      if isinstance(prompt, str):
        if self.tokenizer is None:
          raise ValueError("the target has no tokenizer; give token ids")
        prompt = self.tokenizer.encode(prompt)
      if not 1 <= len(prompt) <= self.prompt_size:
        raise ValueError(
          f"prompt {number} has {len(prompt)} tokens; prompt_size allows 1 to "
          f"{self.prompt_size}"
        )
      rows.append(list(prompt))
    return batches_of(rows, self.batch)

  def first_rounds(
    self, rows: Sequence[Sequence[int]], max_rounds: int
  ) -> tuple[Stats, Outcomes | None]:
    """Counts what became of the draft tokens of at most so many rounds.

    Returns:
      Counts of these rows, and outcomes of the whole batch, on the host.
    """
    numbers = range(len(rows))
    state = self.run(self.start(Batch(rows, numbers)), max_rounds)
    check_finite(state, numbers)
    outcomes = jax.tree.map(multihost.whole, state.outcomes)
    return stats_of(state, len(rows)), outcomes

  def complete(self, batch: Batch, strict: bool = True) -> Completed:
    """Decodes a batch in one program: what a speed should be taken from. Texts
    that end where a distribution is not finite are refused, if `strict`."""
    completed = self.decode(batch, every=decode.MAX_ROUNDS)
    if strict and completed.faults:
      raise ValueError(completed.faults[0])
    return completed

  def decode(
    self,
    batch: Batch,
    push: Callable[[int, NewTokens], bool] | None = None,
    every: int = 8,
    run: Callable[[DecodeState, int], DecodeState] | None = None,
  ) -> Completed:
    """Decodes a batch in pieces and hands on the tokens of each.

    Args:
      push: takes a row's number in the batch and its new tokens, and says
        whether the row is to stop.
      every: rounds of a piece.
      run: in the place of `run`, as a `round_trace.Tracer`.
    """
    run = run or self.run
    begin = time.perf_counter()
    state = jax.block_until_ready(self.start(batch))
    prefill_seconds = time.perf_counter() - begin
    begins = [self.num_given(ids) for ids in batch.rows]
    lengths, seconds = begins, 0.0
    while not np.all(multihost.whole(state.done)):
      begin = time.perf_counter()
      state = run(state, every)
      seconds += time.perf_counter() - begin
      if push:
        state, lengths = self._push(state, lengths, push)
    tokens, length = map(multihost.whole, (state.tokens, state.length))
    return Completed(
      [tokens[i, first : length[i]].tolist() for i, first in enumerate(begins)],
      seconds,
      prefill_seconds,
      stats_of(state, len(batch.rows)),
      faults_of(state, batch.numbers),
    )

  def _push(self, state: DecodeState, lengths: list[int], push):
    """Hands on what is new after these lengths, and stops rows."""
    ends = multihost.whole(state.length)
    names = "tokens", "origin", "log_probs", "draft_log_probs"
    columns = [multihost.whole(getattr(state, name)) for name in names]
    stop = np.zeros((self.batch,), bool)
    for i, length in enumerate(lengths):
      new = (column[i, length : ends[i]] for column in columns)
      stop[i] = push(i, NewTokens(*new))
    if stop.any():
      done = multihost.whole(state.done) | stop
      state = state.replace(done=multihost.put(done, state.done.sharding))
    return state, list(ends[: len(lengths)])


def _check_bits(params: Params) -> None:
  """Refuses weights of four bits on several devices where JAX does.

  Raises:
    ValueError: JAX before 0.12, whose compiled programs take a divided array of
      four bits for one of another layout.
  """
  four = {jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4)}
  held = {x.dtype for x in jax.tree.leaves(params) if isinstance(x, jax.Array)}
  if held & four and jax.__version_info__ < (0, 12):
    raise ValueError(
      f"weights of four bits on a mesh need JAX 0.12; this is {jax.__version__}"
    )
