"""Samples training data for a draft model from its target.

In decoding the draft's prefixes are written by the target; DistillSpec
(arXiv:2310.08461) reports that target-generated data distils best. Invariant: a
batch on disk is complete, so that interrupted sampling resumes.
"""

import functools
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from specdec import decode, multihost, sampling
from specdec.benchmark import batches
from specdec.training.data import Sequences
from specdec.training.options import Options
from specdec.training.setup import Samples
from specdec.types import Model, Params, PyTree
from specdec.utils import files

BATCH = 16  # rows decoded together


def check(settings: Samples | None, data: Sequences) -> None:
  """Refuses samples that `of_target` could not take.

  Raises:
    ValueError: prompts are as long as a sequence, or fewer than BATCH.
  """
  if not settings or not settings.count:
    return
  if settings.prompt > data.length:
    raise ValueError(
      f"samples.prompt = {settings.prompt}; it must leave room in a sequence "
      f"of {data.length + 1} tokens"
    )
  count = len(data.evenly_spaced(settings.count))
  if count < BATCH:
    raise ValueError(
      f"{count} prompts to sample after; at least {BATCH} are needed"
    )


def of_target(
  settings: Samples | None,
  data: Sequences,
  target: Model,
  params: PyTree,
  options: Options,
  folder: Path,
) -> Sequences:
  """Returns texts that begin as those of `data` and are sampled from there on.

  No token ends a row: after an end token it continues with another text.

  Args:
    settings: without a count: returns `data`. The count is rounded down to a
      multiple of BATCH.
    data: `check`ed.
    folder: of the run; completed batches are in its folder `samples`.

  Raises:
    ValueError: a distribution is not finite.
  """
  if not settings or not settings.count:
    return data
  prompts = data.evenly_spaced(settings.count)[:, : settings.prompt]
  folder, length = folder / "samples", options.sequence + 1
  files.make_folder(folder)
  rows = []
  starts = range(0, len(prompts) - BATCH + 1, BATCH)
  for start in tqdm(starts, desc="sampling", unit=f" x {BATCH} rows"):
    path = folder / f"{start:08d}.npy"
    if multihost.agree(path.is_file()):
      # Only the first of several processes has the file.
      blank = np.zeros((BATCH, length), np.int32)
      tokens = multihost.agree(
        files.load_array(path) if multihost.is_first() else blank
      )
    else:
      index = start + np.arange(BATCH)
      state = decode.autoregress(
        target,
        Params(params),
        prompts[index],
        np.full((BATCH,), prompts.shape[1]),
        jax.random.key(options.seed),
        max_length=length,
        sampling=sampling.settings(BATCH, settings.temperature),
        index=index,
      )
      batches.check_finite(state, index)
      tokens = multihost.whole(state.tokens)
      if multihost.is_first():
        files.replace_file(path, functools.partial(np.save, arr=tokens))
    rows.append(tokens)
  return Sequences(np.concatenate(rows), options.seed)
