"""Drafters in the formats of others: read by their config, nothing guessed.

A format is a module with NAME, matches(files), parse(files, target) and, where
it can be written, render(head_config, target, dtype), table(head_config) and
maybe FILE, the name of its weights. To add one, write the module and list it in
FORMATS, or in WRITTEN too.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

from specdec import drafters
from specdec.checkpoints import hf_config, huggingface, names
from specdec.checkpoints.formats import (
  deepspec,
  dflash,
  eagle,
  medusa,
  mlp_speculator,
  native_mtp,
  redrafter,
  speculators,
  tables,
)
from specdec.checkpoints.formats.files import PATTERNS, Files, open_folder
from specdec.checkpoints.formats.stored import Stored, Target
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.types import PyTree
from specdec.utils import files as disk
from specdec.utils.spelling import join_names, naming

# In the order in which they are tried.
FORMATS = (
  *(speculators, dflash, deepspec, medusa, mlp_speculator, redrafter),
  *(native_mtp, eagle),
)
_WRITTEN = speculators, eagle, medusa, dflash, deepspec
WRITTEN = {module.NAME: module for module in _WRITTEN}
_OFFSETS, _KEPT = "d2t", "t2d"
_FLOATS = "float64", "float32", "float16", "bfloat16"
# Architectures and types of drafters that do not load.
_ABSENT = {
  "DFlashLagunaForCausalLM": "DFlash with Laguna's layers",
  "Gemma4DSparkModel": "DSpark with Gemma 4's layers",
  "K3DSparkModel": "DSpark with latent attention",
  "MuseGlimmerAssistantModel": "DFlash with Muse Glimmer's keys",
}

__all__ = [
  "FORMATS",
  "PATTERNS",
  "WRITTEN",
  "Drafter",
  "Target",
  "inspect",
  "load",
  "render",
  "save",
]


class Drafter(NamedTuple):
  """A drafter as it was read."""

  stored: Stored
  ids: np.ndarray | None  # [n] tokens that it can draft; None: all
  net: PyTree  # float32 weights


def target_of(config: TransformerConfig) -> Target:
  """Returns what a drafter's format needs to know of a target."""
  return Target(
    config.num_layers,
    config.width,
    config.vocab_size,
    logit_softcap=config.logit_softcap,
    scale_embedding=config.scale_embedding,
  )


def inspect(
  folder: Path, target: TransformerConfig | None = None
) -> HeadConfig:
  """Reads the head config of a drafter's folder; no weights.

  Without a target, the layers that an EAGLE-3 reads by default are zeros.

  Raises:
    FileNotFoundError: a file is not there.
    ValueError: its format is unknown, or it has what does not load.
  """
  target = target and target_of(target)
  return _parse(open_folder(folder), target).head_config


def _parse(files: Files, target: Target | None) -> Stored:
  kinds = hf_config.architectures(files.config)
  absent = [_ABSENT[kind] for kind in kinds if kind in _ABSENT]
  for module in FORMATS:
    if module.matches(files) and not absent:
      with naming(files.source):
        return module.parse(files, target)
  what = f"a {absent[0]}, which does not load" if absent else "no drafter"
  raise ValueError(
    f"{files.source} holds {what}; drafters of these formats load: "
    f"{', '.join(module.NAME for module in FORMATS)}"
  )


def load(folder: Path, target: TransformerConfig) -> Drafter:
  """Reads a drafter for a target.

  Raises:
    FileNotFoundError: a file is not there.
    ValueError: its format is unknown or it is damaged, or it is for another
      target.
  """
  files = open_folder(folder)
  stored = _parse(files, target_of(target))
  _check_target(stored, target, files.source)
  files = stored.files or files
  head_config = stored.head_config
  ids = _read_ids(files, head_config.vocabulary, target.vocab_size)
  shapes = _shapes(head_config, target, ids)
  assert shapes.keys() == stored.table.keys()  # a name for each parameter
  names.check(
    {name: shapes[path] for path, name in stored.table.items()},
    {
      name: _without_ones(shape) if name == tables.MASK else shape
      for name, shape in files.shapes.items()
      if name.startswith(stored.prefix) and name not in (_OFFSETS, _KEPT)
    },
    files.source,
    ignored=re.compile(rf"{stored.ignored or '-'}|.*rotary_emb\.inv_freq"),
  )
  flat = {}
  for path, name in stored.table.items():
    array = files.read(name)
    if array.dtype.name not in _FLOATS:
      raise ValueError(f"{name} in {files.source} is stored as {array.dtype}")
    array = array.astype(np.float32).reshape(shapes[path])
    flat[path] = jax.numpy.asarray(array)
  return Drafter(stored, ids, traverse_util.unflatten_dict(flat, sep="/"))


def _shapes(
  head_config: HeadConfig, target: TransformerConfig, ids: np.ndarray | None
) -> dict[str, tuple[int, ...]]:
  """Returns path -> shape of a head's parameters."""
  head = drafters.LEARNED[head_config.kind](head_config, target, ids)
  net = jax.eval_shape(head.init, jax.random.key(0))
  return {
    path: leaf.shape
    for path, leaf in traverse_util.flatten_dict(net, sep="/").items()
  }


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns a shape without leading axes of one entry; vLLM flattens them."""
  while len(shape) > 1 and shape[0] == 1:
    shape = shape[1:]
  return shape


def _check_target(
  stored: Stored, target: TransformerConfig, source: str
) -> None:
  """Refuses a target of other sizes; says which."""
  verifier = f", {stored.verifier}," if stored.verifier else ""
  pairs = {
    "tokens": (stored.vocab_size, target.vocab_size),
    "hidden width": (stored.target_width, target.width),
  }
  for what, (expected, actual) in pairs.items():
    if expected not in (None, actual):
      raise ValueError(
        f"{source} is for another target{verifier} than this one: "
        f"{what} {expected} there, {actual} here"
      )
  with naming(source):
    stored.head_config.check(target)


def _read_ids(files: Files, count: int, vocab_size: int) -> np.ndarray | None:
  """Returns the tokens [n] that a drafter can draft, ascending; None: all.

  d2t holds id - index of each, t2d whether a token of the target is one.
  """
  source, here = files.source, files.shapes
  ids = np.arange(vocab_size, dtype=np.int32)
  if _OFFSETS in here:
    ids = _offsets(files, vocab_size)
  elif count:
    raise ValueError(
      f"{source} drafts {count} of {vocab_size} tokens and holds no {_OFFSETS}"
    )
  if len(ids) != (count or vocab_size):
    raise ValueError(
      f"{source} holds a {_OFFSETS} of {len(ids)} tokens; its config says "
      f"{count or vocab_size}"
    )
  if _KEPT in here:
    kept = files.read(_KEPT)
    if kept.shape != (vocab_size,) or not np.array_equal(
      np.flatnonzero(kept), ids
    ):
      raise ValueError(
        f"{source} is damaged: {_KEPT} does not name the tokens that it drafts"
      )
  return ids if count else None


def _offsets(files: Files, vocab_size: int) -> np.ndarray:
  offsets = files.read(_OFFSETS)
  if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or not len(offsets):
    raise ValueError(
      f"{files.source}: {_OFFSETS} must hold integers [n], n > 0"
    )
  ids = offsets.astype(np.int64) + np.arange(len(offsets))
  if np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
    raise ValueError(
      f"{files.source}: {_OFFSETS} must name tokens below {vocab_size} in "
      "ascending order"
    )
  return ids.astype(np.int32)


def holds_copies(format_name: str) -> bool:
  """Whether a format's files hold the target's tables, which its own reader
  takes from nowhere else."""
  return getattr(WRITTEN.get(format_name), "HOLDS_COPIES", False)


def render(
  format_name: str,
  head_config: HeadConfig,
  target: Target,
  dtype: str = "bfloat16",
) -> dict[str, Any]:
  """Returns the config.json of a drafter; raises as `save`."""
  if not head_config.is_published:
    raise ValueError(
      f"a head with layout = {head_config.layout!r} has shapes that no format "
      "but ours knows; train one with layout = 'published', as the kinds "
      "of configs/train/drafter.py that begin with published_"
    )
  return WRITTEN[format_name].render(head_config, target, dtype)


def save(
  folder: Path,
  format_name: str,
  head_config: HeadConfig,
  ids: np.ndarray | None,
  net: PyTree,
  target: Target,
  dtype: str = "bfloat16",
) -> None:
  """Writes config.json and model.safetensors of a drafter into a folder.

  Args:
    format_name: one of WRITTEN.
    ids: [n] tokens that it can draft; None: all.
    dtype: of the stored weights.

  Raises:
    ValueError: the format has no place for an option of the drafter.
  """
  module = WRITTEN[format_name]
  config = render(format_name, head_config, target, dtype)
  flat = traverse_util.flatten_dict(net, sep="/")
  table = module.table(head_config)
  assert len({*table.values()}) == len(table), table  # a name a tensor
  if unknown := sorted({*flat} - {*table}):
    raise ValueError(
      f"{format_name} has no place for {join_names(unknown)} of this "
      f"{head_config.kind}"
    )
  arrays = {
    table[path]: np.asarray(jax.numpy.asarray(x, dtype))
    for path, x in flat.items()
  }
  if tables.MASK in arrays:  # as speculators and SpecForge have it
    arrays[tables.MASK] = arrays[tables.MASK][None, None]
  if ids is not None:
    kept = np.zeros((target.vocab_size,), bool)
    kept[ids] = True
    arrays |= {
      _OFFSETS: np.asarray(ids, np.int64) - np.arange(len(ids)),
      _KEPT: kept,
    }
  disk.make_folder(folder)
  text = json.dumps(config, indent=2) + "\n"
  disk.replace_file(folder / "config.json", text)
  name = getattr(module, "FILE", huggingface.SINGLE)
  huggingface.save_arrays(folder, arrays, name)
