"""A whole run: resume, train, evaluate, keep the best, stop on NaN.

Invariant: everything the run computes follows from its options, data and first
weights; where it was interrupted changes nothing.
"""

import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tqdm import tqdm

from specdec import multihost
from specdec.training import loop
from specdec.training.data import Sequences
from specdec.training.log import Log
from specdec.training.objective import Objective
from specdec.training.options import Options
from specdec.training.saving import Checkpoints
from specdec.types import PyTree
from specdec.utils import terminal


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
  where: PyTree | None = None,
  evaluated: Objective | None = None,
) -> PyTree:
  """Trains `params`, going on where the run in `folder` stopped.

  Args:
    params: float32 weights to begin with.
    frozen: weights that the objective uses and leaves alone.
    data, held_out: sequences to learn from and to be evaluated by.
    folder: gets checkpoints, metrics.jsonl and TensorBoard's files.
    export: called with weights and 'best' (lowest held-out loss so far) or
      'last' (when the run is over).
    decode: measures of weights by decoding, taken at every evaluation.
    where: NamedShardings of the weights, on a mesh with an axis `data`, where
      `frozen` lies already; None: whole on every device.
    evaluated: the objective for held-out sequences, where it measures more.

  Returns:
    The last weights.

  Raises:
    NotFinite: the loss is NaN or infinite; the last good checkpoint stays.
    ValueError: no checkpoint of the run can be read.
  """
  optimizer = loop.make_optimizer(options)
  if where is None:
    state = loop.init(jax.tree.map(jnp.copy, params), optimizer)
    # Weights stand whole on every device, and each computes some of the rows.
    mesh = jax.make_mesh(
      (_num_shards(options),), ("data",), axis_types=(AxisType.Auto,)
    )
    whole = NamedSharding(mesh, PartitionSpec())
    frozen = jax.device_put(frozen, whole)
    places = None
    state = jax.device_put(state, whole)
  else:
    mesh = jax.tree.leaves(where)[0].mesh
    whole = NamedSharding(mesh, PartitionSpec())
    make = functools.partial(loop.init, optimizer=optimizer)
    shapes = jax.eval_shape(make, params)
    places = loop.shardings(shapes, optimizer, where, whole)
    # Nowhere does a device get more than its parts.
    state = jax.jit(make, out_shardings=places)(jax.device_put(params, where))
  rows = NamedSharding(mesh, PartitionSpec("data"))
  checkpoints = Checkpoints(folder)
  restored, faults = checkpoints.restore(state)
  for fault in faults:
    text = f"train: {fault}; the one before is used"
    terminal.report(text, file=sys.stderr)
  if restored is not None:
    state = restored
    terminal.report(
      f"train: going on after step {int(state.step)}", file=sys.stderr
    )
  log = Log(folder, int(state.step))
  step = loop.make_step(objective, optimizer, options, places)
  evaluation = loop.make_evaluation(evaluated or objective, options)
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
      batch = jax.tree.map(
        lambda x: multihost.put(x, rows), data.batch(at, options.batch)
      )
      state, measures = step(state, frozen, batch)
      bar.update()
      now = at + 1
      due = [
        now == options.steps or now % every == 0
        for every in (options.log_every, options.eval_every, options.save_every)
      ]
      if any(due):
        _check(state, checkpoints)
      if due[0]:
        values = {name: float(value) for name, value in measures.items()}
        rate = (now - since) * tokens / (time.perf_counter() - began)
        log.write(now, "train", values)
        bar.set_postfix_str(f"loss {values['loss']:.3f}, {rate:,.0f} tokens/s")
      if due[1]:
        values = _evaluate(
          functools.partial(evaluation, state.params, frozen),
          sequences,
          options.batch // options.accumulate,
          rows,
        )
        if values["loss"] < log.lowest:
          export(state.params, "best")
        log.write(now, "held_out", values)
        bar.write(f"step {now}: held-out {_line(values)}", file=sys.stderr)
        if decode is not None:
          weights = state.params
          if where is None:  # one device is enough
            weights = jax.tree.map(lambda x: x.addressable_data(0), weights)
          values = decode(weights)
          log.write(now, "decoding", values)
          bar.write(f"step {now}: decoding {_line(values)}", file=sys.stderr)
      if due[2]:
        checkpoints.save(state)
      if at == first or due[1] or due[2]:  # compiling and pauses are no speed
        began, since = time.perf_counter(), now
    export(state.params, "last")
  finally:
    bar.close()
    log.close()
    checkpoints.close()
  return state.params


def _line(values: dict) -> str:
  """'loss 1.234, prefix_acceptance 0.81 0.64': what is worth a line."""
  parts = []
  for name, value in values.items():
    numbers = value if isinstance(value, list) else [value]
    if all(isinstance(number, float) for number in numbers):
      parts.append(" ".join([name, *(f"{number:.3f}" for number in numbers)]))
  return ", ".join(parts)


def _check(state: loop.TrainState, checkpoints: Checkpoints) -> None:
  failed = int(state.failed)
  if failed < 0:
    return
  newest = checkpoints.newest()
  left = "no checkpoint was written before"
  if newest is not None:
    left = f"the last good checkpoint, of step {newest}, stays"
  raise NotFinite(
    f"the loss or its gradient is not finite at step {failed}; {left}"
  )


def _num_shards(options: Options) -> int:
  """Devices that the rows of a piece can be spread over."""
  return math.gcd(jax.device_count(), options.batch // options.accumulate)


def _evaluate(measure, sequences, size: int, rows) -> dict[str, float]:
  """Means over the held-out sequences, `size` at a time."""
  totals: dict[str, float] = {}
  for first in range(0, len(sequences), size):
    piece = sequences[first : first + size]
    if len(piece) % rows.mesh.shape["data"] == 0:
      piece = multihost.put(piece, rows)
    for name, value in measure(piece).items():
      totals[name] = totals.get(name, 0.0) + float(value) * len(piece)
  return {name: total / len(sequences) for name, total in totals.items()}
