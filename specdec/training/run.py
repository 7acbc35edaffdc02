"""A whole run: resume, train, evaluate, keep the best, stop on NaN.

Invariant: everything the run computes follows from its options, data and first
weights; where it was interrupted changes nothing.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm import tqdm

from specdec.training import loop
from specdec.training.data import Sequences
from specdec.training.log import Log
from specdec.training.objective import Objective
from specdec.training.options import Options
from specdec.training.saving import Checkpoints
from specdec.types import PyTree


class NotFinite(ValueError):
  """The loss or its gradient stopped being finite."""


def train(
  params: PyTree,
  frozen: PyTree,
  objective: Objective,
  data: Sequences,
  held_out: Sequences,
  options: Options,
  folder: Path,
  *,
  export: Callable[[PyTree, str], None],
  decode: Callable[[PyTree], dict] | None = None,
) -> PyTree:
  """Trains `params`, going on where the run in `folder` stopped.

  Args:
    params: float32 weights to begin with.
    frozen: weights that the objective uses and leaves alone.
    data, held_out: sequences to learn from and to be judged by.
    folder: gets checkpoints, metrics.jsonl and TensorBoard's files.
    export: called with weights and 'best' (lowest held-out loss so far) or
      'last' (when the run is over).
    decode: measures of weights by decoding, taken at every evaluation.

  Returns:
    The last weights.

  Raises:
    NotFinite: the loss is NaN or infinite; the last good checkpoint stays.
    ValueError: no checkpoint of the run can be read.
  """
  optimizer = loop.make_optimizer(options)
  state = loop.init(jax.tree.map(jnp.copy, params), optimizer)
  checkpoints = Checkpoints(folder)
  restored, faults = checkpoints.restore(state)
  for fault in faults:
    print(f"train: {fault}; the one before is used", file=sys.stderr)
  if restored is not None:
    state = restored
    print(f"train: going on after step {int(state.step)}", file=sys.stderr)
  log = Log(folder, int(state.step))
  step = loop.make_step(objective, optimizer, options)
  evaluation = loop.make_evaluation(objective, options)
  sequences = held_out.spread(options.eval_sequences)
  tokens = options.batch * options.sequence

  bar = tqdm(
    total=options.steps,
    initial=int(state.step),
    unit="step",
    mininterval=1.0,
    dynamic_ncols=True,
  )
  first = int(state.step)
  began, since = time.perf_counter(), first
  try:
    for at in range(first, options.steps):
      batch = jnp.asarray(data.batch(at, options.batch))
      state, measures = step(state, frozen, batch)
      bar.update()
      now = at + 1
      due = [
        now == options.steps or now % every == 0
        for every in (options.log_every, options.eval_every, options.save_every)
      ]
      if any(due):
        _check(state, folder)
      if due[0]:
        values = {name: float(value) for name, value in measures.items()}
        rate = (now - since) * tokens / (time.perf_counter() - began)
        log.write(now, "train", values)
        bar.set_postfix_str(f"loss {values['loss']:.3f}, {rate:,.0f} tokens/s")
      if due[1]:
        values = _evaluate(
          evaluation,
          state.params,
          frozen,
          sequences,
          options.batch // options.accumulate,
        )
        if values["loss"] < log.lowest:
          export(state.params, "best")
        log.write(now, "held_out", values)
        bar.write(f"step {now}: held-out {_line(values)}", file=sys.stderr)
        if decode is not None:
          values = decode(state.params)
          log.write(now, "decoding", values)
          bar.write(f"step {now}: decoding {_line(values)}", file=sys.stderr)
      if due[2]:
        checkpoints.save(state)
      if at == first or due[1] or due[2]:  # compiling and pauses are no speed
        began, since = time.perf_counter(), now
    export(state.params, "last")
  finally:
    bar.close()
    checkpoints.close()
    log.close()
  return state.params


def _line(values: dict) -> str:
  return ", ".join(
    f"{name} {value:.3f}"
    for name, value in values.items()
    if isinstance(value, float)
  )


def _check(state: loop.TrainState, folder: Path) -> None:
  failed = int(state.failed)
  if failed >= 0:
    raise NotFinite(
      f"the loss or its gradient is not finite at step {failed}; the last good "
      f"checkpoint stays in {folder / 'checkpoints'}"
    )


def _evaluate(evaluation, params, frozen, sequences, size) -> dict[str, float]:
  """Means over the held-out sequences, `size` at a time."""
  totals: dict[str, float] = {}
  for first in range(0, len(sequences), size):
    piece = sequences[first : first + size]
    for name, value in evaluation(params, frozen, jnp.asarray(piece)).items():
      totals[name] = totals.get(name, 0.0) + float(value) * len(piece)
  return {name: total / len(sequences) for name, total in totals.items()}
