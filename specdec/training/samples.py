"""The target's own texts as training data, for a draft that must follow it.

A draft is used after prefixes that the target wrote; DistillSpec
(arXiv:2310.08461) finds that data of that kind distils best. Invariant: a
piece on disk is whole, so sampling goes on where it was stopped.
"""

import functools
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from specdec import decode, multihost, sampling
from specdec.benchmark import decoder
from specdec.types import Model, Params, PyTree
from specdec.utils import files

PIECE = 16  # rows decoded together


def sample(
  target: Model,
  params: PyTree,
  prompts: np.ndarray,
  length: int,
  folder: Path,
  *,
  temperature: float = 1.0,
  seed: int = 0,
) -> np.ndarray:
  """[n, length] ids: every prompt and what the target says next.

  Args:
    prompts: [n, P] ids with P < length; n is cut to a multiple of PIECE.
    folder: keeps the pieces that are done. No token ends a text: a row goes on
      with whatever follows an end in the target's data.

  Raises:
    ValueError: there are fewer than PIECE prompts, or a distribution is not
      finite.
  """
  if len(prompts) < PIECE:
    raise ValueError(
      f"{len(prompts)} prompts to sample after; at least {PIECE} are needed"
    )
  folder.mkdir(parents=True, exist_ok=True)
  rows = []
  starts = range(0, len(prompts) - PIECE + 1, PIECE)
  for start in tqdm(starts, desc="sampling", unit=f" x {PIECE} rows"):
    path = folder / f"{start:08d}.npy"
    if multihost.agree(path.is_file()):
      # Of several processes the first has it.
      blank = np.zeros((PIECE, length), np.int32)
      tokens = multihost.agree(np.load(path) if multihost.is_first() else blank)
    else:
      state = decode.autoregress(
        target,
        Params(params),
        prompts[start : start + PIECE],
        np.full((PIECE,), prompts.shape[1]),
        jax.random.key(seed),
        max_length=length,
        sampling=sampling.settings(PIECE, temperature),
        index=start + np.arange(PIECE),
      )
      decoder.check_finite(state, start + np.arange(PIECE))
      tokens = multihost.whole(state.tokens)
      if multihost.is_first():
        files.replace_file(path, functools.partial(np.save, arr=tokens))
    rows.append(tokens)
  return np.concatenate(rows)
