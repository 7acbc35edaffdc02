"""Training run: resumes, trains, evaluates, exports the best, stops on NaN.

Invariant: the weights are a function of options, data and initial weights;
interruptions do not affect them.
"""

import dataclasses
import functools
import math
import operator
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
from specdec.training.log import Log, score
from specdec.training.objective import Objective, num_positions
from specdec.training.options import FREE, Options
from specdec.training.saving import Checkpoints, checksum
from specdec.types import PyTree
from specdec.utils import profiling, run_folder, terminal


class NotFinite(ValueError):
  """The loss or its gradient is not finite."""


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
  """Trains `params`, resuming the run in `folder` if there is one.

  Args:
    params: initial float32 weights.
    frozen: weights that the objective uses but does not train.
    held_out: sequences for evaluation.
    folder: for checkpoints, metrics.jsonl and TensorBoard's files.
    export: called with weights and 'best' (lowest log.score so far) or
      'last' (at the end of the run).
    decode: returns measures of weights by decoding, at every evaluation.
    where: NamedShardings of the weights, on a mesh with an axis `data` that
      holds `frozen` already; None replicates the weights on all devices.
    evaluated: objective for held-out sequences; None: `objective`.

  Returns:
    The final weights.

  Raises:
    NotFinite: the loss is NaN or infinite; the last good checkpoint remains.
    ValueError: no checkpoint of the run can be read.
    NotWritten: the disk is full, for example.
  """
  optimizer = loop.make_optimizer(options)
  piece = options.batch // options.accumulate  # sequences computed at once
  if where is None:
    state = loop.init(jax.tree.map(jnp.copy, params), optimizer)
    # Data parallel: weights are replicated, rows of a batch are split.
    ways = math.gcd(jax.device_count(), piece)
    mesh = jax.make_mesh((ways,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    frozen = jax.device_put(frozen, replicated)
    state_shardings = None
    state = jax.device_put(state, replicated)
  else:
    mesh = jax.tree.leaves(where)[0].mesh
    replicated = NamedSharding(mesh, PartitionSpec())
    init = functools.partial(loop.init, optimizer=optimizer)
    shapes = jax.eval_shape(init, params)
    state_shardings = loop.shardings(shapes, optimizer, where, replicated)
    # Jitted, so that each device allocates only its shards.
    state = jax.jit(init, out_shardings=state_shardings)(
      jax.device_put(params, where)
    )
  rows = NamedSharding(mesh, PartitionSpec("data"))
  put = functools.partial(multihost.put, where=rows)
  checkpoints = Checkpoints(folder)
  restored, faults = checkpoints.restore(state)
  for fault in faults:
    terminal.report(f"train: {fault}; using the previous one", file=sys.stderr)
  if restored is not None:
    state = restored
    terminal.report(
      f"train: resuming after step {int(state.step)}", file=sys.stderr
    )
  log = Log(folder, int(state.step))
  step = loop.make_step(objective, optimizer, options, state_shardings)
  evaluation = loop.make_evaluation(evaluated or objective, options)
  sequences = held_out.evenly_spaced(options.eval_sequences)
  tokens = options.batch * options.sequence

  bar = tqdm(
    total=options.steps,
    initial=int(state.step),
    unit="step",
    mininterval=1.0,
    dynamic_ncols=True,
  )
  first = saved = done = int(state.step)
  traced = profiling.Steps(options.profile, first)
  timed_from, timed_since = first, time.perf_counter()
  try:
    for index in range(first, options.steps):
      traced.before(index, state)
      batch = jax.tree.map(put, data.batch(index, options.batch))
      state, measures = step(state, frozen, batch)
      bar.update()
      now = index + 1
      log_due, eval_due, save_due = (
        now == options.steps or now % every == 0
        for every in (options.log_every, options.eval_every, options.save_every)
      )
      if log_due or eval_due or save_due:
        _check_finite(state, checkpoints)
      if log_due:
        values = {name: float(value) for name, value in measures.items()}
        seconds = time.perf_counter() - timed_since
        rate = (now - timed_from) * tokens / seconds
        log.write(now, "train", values)
        bar.set_postfix_str(f"loss {values['loss']:.3f}, {rate:,.0f} tokens/s")
      if eval_due:
        values = _evaluate(
          functools.partial(evaluation, state.params, frozen),
          sequences,
          piece,
          rows,
        )
        if score(values) < log.lowest:
          export(state.params, "best")
        log.write(now, "held_out", values)
        bar.write(f"step {now}: held-out {_format(values)}", file=sys.stderr)
        if decode is not None:
          weights = state.params
          if where is None:  # decodes on one device
            weights = jax.tree.map(lambda x: x.addressable_data(0), weights)
          values = decode(weights)
          log.write(now, "decoding", values)
          bar.write(f"step {now}: decoding {_format(values)}", file=sys.stderr)
      if save_due:
        checkpoints.save(state)
        saved = now
      if index == first or eval_due or save_due:
        # Excludes compilation and pauses from the rate.
        timed_from, timed_since = now, time.perf_counter()
      done = now
    export(state.params, "last")
    bar.write(
      f"train: {options.steps:,} steps are done; {folder} has the last weights "
      "and those of the best evaluation",
      file=sys.stderr,
    )
  except KeyboardInterrupt:
    # An update may have been under way, or what is due after one: a run that
    # goes on from there would lack it. Other processes do not stop with it.
    under_way = any(x.is_deleted() for x in jax.tree.leaves(state))
    is_whole = not under_way and int(state.step) == done
    if jax.process_count() == 1 and is_whole and done > saved:
      _check_finite(state, checkpoints)
      checkpoints.save(state)
    raise
  finally:
    bar.close()
    traced.close()
    log.close()
    checkpoints.close()
  return state.params


def settings(
  setup, texts: tuple[Sequences, Sequences], **trees: PyTree
) -> dict:
  """Returns what defines a run: its setup and checksums, as JSON values.

  Args:
    texts: for training and evaluation.
    trees: further arrays to take checksums of, by name.
  """
  trees = {"data": texts[0].content, "held_out": texts[1].content} | trees
  checksums = {name: checksum(tree) for name, tree in trees.items()}
  return dataclasses.asdict(setup) | {"checksums": checksums}


def claim(folder: Path, settings: dict) -> None:
  """Takes the folder of a run, which may resume with other FREE options."""
  run_folder.claim(folder, settings, FREE)


def announce(size: str, options: Options, data: Sequences) -> None:
  """Reports what is trained, of which `size`, and on how much text."""
  tokens = options.steps * options.batch * options.sequence
  terminal.report(
    f"train: {size}, {options.steps:,} steps of {options.batch} x "
    f"{options.sequence} tokens, {tokens / 1e6:.2f} M in all, "
    f"{tokens / data.tokens:.2f} times over the data",
    file=sys.stderr,
  )


def _format(values: dict) -> str:
  """Formats measures as 'loss 1.234, prefix_acceptance 0.81 0.64'."""
  parts = []
  for name, value in values.items():
    numbers = value if isinstance(value, list) else [value]
    if all(isinstance(number, float) for number in numbers):
      parts.append(" ".join([name, *(f"{number:.3f}" for number in numbers)]))
  return ", ".join(parts)


def _check_finite(state: loop.TrainState, checkpoints: Checkpoints) -> None:
  failed = int(state.failed)
  if failed < 0:
    return
  newest = checkpoints.newest()
  remaining = "there is no earlier checkpoint"
  if newest is not None:
    remaining = f"the last good checkpoint is that of step {newest}"
  raise NotFinite(
    f"the loss or its gradient is not finite at step {failed}; {remaining}"
  )


def _evaluate(measure, sequences, size: int, rows) -> dict[str, float]:
  """Returns means of measures over sequences, evaluating `size` at a time.

  Args:
    rows: sharding of a batch whose rows its mesh divides.
  """
  totals, total = {}, 0
  put = functools.partial(multihost.put, where=rows)
  rows_in_all = len(jax.tree.leaves(sequences)[0])
  for first in range(0, rows_in_all, size):
    part = slice(first, first + size)
    batch = jax.tree.map(operator.itemgetter(part), sequences)
    count = int(num_positions(batch))
    total += count
    if len(jax.tree.leaves(batch)[0]) % rows.mesh.shape["data"] == 0:
      batch = jax.tree.map(put, batch)
    for name, value in measure(batch).items():
      totals[name] = totals.get(name, 0.0) + float(value) * count
  return {name: value / total for name, value in totals.items()}
