"""Checks what a drafter makes of the loop: one program, the baseline's text,
and rows that know nothing of each other.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec import acceptance, decode, slots
from specdec.compiled import hlo
from specdec.testing.books import check_books, require
from specdec.testing.trial import (
  LENGTH,
  PROMPT,
  REJECTION,
  ROWS,
  Trial,
  texts_of,
)
from specdec.types import Drafter

_ARRIVING = 6  # rows that take the place of others; ROWS / 3 at most
# Operations that make a second buffer of what they are given.
_COPYING = ("copy", "copy-start", "transpose", "concatenate", "pad", "reverse")


def check_trace(trial: Trial) -> None:
  """Other prompts, lengths, settings and limits are no other program."""
  if not isinstance(trial.make, Drafter):
    require(
      trial.make() == trial.make(),
      "two calls of its constructor give two drafters, and each of them is "
      "compiled; decorate it with specdec.utils.constructors.cached",
    )
  try:
    hash(trial.spec)
  except TypeError as error:
    require(False, f"its spec cannot be hashed: {error}")
  trial.coupled  # noqa: B018  (traces it)
  traces = trial.traces
  length = np.roll(trial.inputs["prompt_length"], 1)
  trial.run(
    acceptance.coupled(),
    eos=0,
    prompt=(trial.prompt + 1) % trial.target.vocab_size,
    prompt_length=length,
    temperature=np.full(ROWS, 0.5),
    limit=length + 5,
  )
  require(trial.traces == traces, "other prompts were traced once more")


def check_coupled(trial: Trial) -> None:
  """Token for token, at every temperature and prompt length."""
  state = trial.coupled
  _same_text(trial, state, range(ROWS), "under the coupled rule")
  try:
    check_books(state, trial.inputs["prompt_length"])
  except AssertionError as error:
    require(False, f"origins or counts contradict the text: {error}")
  require(
    trial.spec.max_depth == 0 or np.sum(state.stats.drafted) > 0,
    "nothing was drafted, so nothing was checked: give other prompts",
  )


def check_greedy(trial: Trial) -> None:
  """Under each rule that goes with the drafter, among sampled rows."""
  cold = np.flatnonzero(trial.inputs["temperature"] == 0)
  for rule in trial.rules:
    _same_text(trial, trial.run(rule), cold, f"under {rule.name}")


def _same_text(trial: Trial, state, rows, where: str) -> None:
  """These rows are the baseline's."""
  ours, theirs = texts_of(state), texts_of(trial.baseline)
  for row in rows:
    require(
      ours[row] == theirs[row],
      f"row {row} {where} is {ours[row]}, not {theirs[row]}",
    )


def check_eos(trial: Trial) -> None:
  """At tokens that are common, with limits at every place of a draft."""
  baseline = texts_of(trial.baseline)
  start = trial.inputs["prompt_length"]
  new = np.concatenate([t[n:] for t, n in zip(baseline, start)])
  tokens, counts = np.unique(new, return_counts=True)
  limit = np.minimum(start + 1 + np.arange(ROWS) * 7 % 23, LENGTH)
  for eos in tokens[np.argsort(-counts, kind="stable")][:3]:
    state = trial.run(acceptance.coupled(), eos=eos, limit=limit)
    for row, text in enumerate(texts_of(state)):
      new = baseline[row][start[row] : limit[row]]
      new = new[: new.index(eos) + 1 if eos in new else None]
      wanted = baseline[row][: start[row]] + new
      require(
        text == wanted,
        f"row {row}, EOS {eos}, limit {limit[row]}: {text}, not {wanted}",
      )
    beyond = np.arange(LENGTH) >= np.asarray(state.length)[:, None]
    beyond &= np.arange(LENGTH) >= PROMPT
    require(
      not np.any(np.asarray(state.tokens)[beyond]),
      "tokens were written behind the end of a row",
    )
  _check_done_rows(trial, int(eos), limit)


def _check_done_rows(trial: Trial, eos, limit) -> None:
  """A round changes nothing of a row that was done before it."""
  state = trial.start(limit=limit)
  before = _frozen(state)
  while not before["done"].all():
    state = trial.go_on(REJECTION, state, eos, 1)
    after, done = _frozen(state), np.flatnonzero(before["done"])
    _require_same(before, done, after, done, "after it was done")
    before = after
  whole, rows = _frozen(trial.run(eos=eos, limit=limit)), np.arange(ROWS)
  _require_same(whole, rows, before, rows, "run round by round")


def check_rows(trial: Trial) -> None:
  """A row with other neighbours, at another place, and alone."""
  together = _frozen(trial.run())
  kept = np.arange(0, ROWS, 3)
  place = (kept + 1) % ROWS
  vocab_size = trial.target.vocab_size
  other = {
    "prompt": trial.rng.integers(0, vocab_size, trial.prompt.shape),
    "prompt_length": trial.rng.integers(1, PROMPT, ROWS),
    "temperature": np.full(ROWS, 1.3),
    "top_k": np.full(ROWS, vocab_size),
    "top_p": np.full(ROWS, 0.8),
    "index": 100 + np.arange(ROWS),
    **trial.sources(),
  }
  for name, values in other.items():
    values[place] = trial.inputs[name][kept]
  moved = _frozen(trial.run(**other))
  where = "with other neighbours"
  _require_same(together, kept, moved, place, where, atol=1e-4)
  alone = np.array([4])
  limit = np.where(np.arange(ROWS) == alone, LENGTH, 1)
  single = _frozen(trial.run(limit=limit))
  _require_same(together, alone, single, alone, "alone", atol=1e-4)


def check_slots(trial: Trial) -> None:
  """Put where other rows were at work: it has the text it had among all."""
  together = _frozen(trial.run())
  arriving = np.arange(_ARRIVING)
  place = 3 * arriving + 1  # where they were not before
  state = trial.run(rounds=3)
  parts = trial.target, trial.drafter, REJECTION, trial.params
  try:
    state = slots.refill(
      *parts, state, jnp.asarray(place), trial.given(arriving)
    )
  except ValueError as error:
    require(False, f"its rows cannot be told apart: {error}")
  state = trial.go_on(REJECTION, state)
  where = "in the place of another"
  _require_same(together, arriving, _frozen(state), place, where, atol=1e-4)


def check_copies(trial: Trial) -> None:
  """In the optimised program of the loop, caches are written in place."""
  state = jax.eval_shape(trial.start)
  caches = jax.tree.leaves((state.target_cache.layers, state.draft_state))
  # XLA copies what has one number a position (the table model) as it likes.
  buffers = [x for x in caches if x.ndim == 4 and x.shape[-1] > 1]
  if not buffers:
    return
  lowered = trial.go_on(REJECTION, state, run=decode.run.lower)
  copies = _cache_copies(lowered.compile().as_text(), buffers)
  require(
    not copies,
    f"{len(copies)} copies of what is as large as a cache, as {copies[:1]}; "
    "if it is none, give the models other sizes",
  )


def _cache_copies(text: str, buffers) -> list[str]:
  """Instructions in loops of optimised HLO that make another buffer of a
  cache's dimensions, in any order."""
  shapes = {tuple(sorted(buffer.shape)) for buffer in buffers}
  program = hlo.Program(text)
  copies = []
  for instruction, _, times in program.runs({"": 2.0}):
    if times < 2:
      continue
    for one in (instruction, *program.inside(instruction)):
      results = {tuple(sorted(buffer.shape)) for buffer in one.buffers}
      if one.op in _COPYING and results & shapes:
        copies.append(one.line.strip())
  return copies


def _frozen(state) -> dict[str, np.ndarray]:
  """Copies of what a row of a state is, whatever the drafter keeps."""
  row = ("tokens", "length", "done", "fault", "origin", "log_probs")
  counts = ("rounds", "drafted", "accepted", "nodes")
  parts = {name: getattr(state, name) for name in (*row, "draft_log_probs")}
  parts |= {name: getattr(state.stats, name) for name in counts}
  return {name: np.array(value) for name, value in parts.items()}


def _require_same(old, rows, new, places, where: str, atol=0.0) -> None:
  """Rows of one `_frozen` state are those at `places` of another."""
  for name in old:
    for row, a, b in zip(rows, old[name][rows], new[name][places]):
      require(
        np.allclose(a, b, rtol=0, atol=atol),
        f"{name} of row {row} {where} is {b}, not {a}",
      )
