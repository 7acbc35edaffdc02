"""Learned drafters on disk: one safetensors file that says what it is.

HeadConfig, vocabulary and the target's fingerprint stand in the file itself, so
they cannot part from the weights. Invariant: a file appears under its name by
one rename, whole; a kill in the middle of a write leaves the one before.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.flax import save as save_bytes

from specdec import drafters, multihost
from specdec.checkpoints.loading import Checkpoint, check_finite
from specdec.drafters.heads.draft_head import DraftHead
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models.config import TransformerConfig
from specdec.sharding import Placement
from specdec.types import PyTree
from specdec.utils import files

SUFFIX = ".safetensors"
_IDS = "vocabulary"
_STORED = "bfloat16"
_SAMPLE = 256  # values of each tensor that a fingerprint looks at


class Learned(NamedTuple):
  """A drafter as it was saved."""

  head_config: HeadConfig
  ids: np.ndarray | None  # [n] tokens that it can draft; None: all
  net: PyTree
  source: str

  def draft_head(
    self, target: TransformerConfig, place: Placement | None = None
  ) -> DraftHead:
    """What drafts, for that target."""
    made = drafters.LEARNED[self.head_config.kind]
    return made(self.head_config, target, self.ids, place)


def fingerprint(target: Checkpoint) -> dict[str, str]:
  """What a drafter was trained for: config, tokenizer and weights, hashed.

  Of every tensor some values are looked at, rounded to bfloat16, so that the
  type in which a target is loaded makes no difference; of the tokenizer what
  its ids stand for, not how it cuts text.
  """
  config = dataclasses.asdict(target.config)
  del config["dtype"]
  weights = hashlib.sha256()
  flat = traverse_util.flatten_dict(target.params, sep="/")
  for name in sorted(flat):
    leaf = flat[name]
    size = int(np.prod(leaf.shape))
    chosen = np.linspace(0, size - 1, min(size, _SAMPLE)).astype(int)
    values = multihost.whole(leaf[np.unravel_index(chosen, leaf.shape)])
    weights.update(f"{name}{leaf.shape}".encode())
    weights.update(np.asarray(values, jax.numpy.bfloat16).tobytes())
  tokens = target.tokenizer.tokens if target.tokenizer else ()
  return {
    "config": _hash(json.dumps(config, sort_keys=True)),
    "tokenizer": _hash(json.dumps(list(tokens))),
    "weights": weights.hexdigest()[:16],
  }


def _hash(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(x: jax.Array) -> jax.Array:
  """A weight as `load` gives back what `save` stored."""
  return x.astype(_STORED).astype(jax.numpy.float32)


def save(
  path: str | Path,
  head_config: HeadConfig,
  ids: np.ndarray | None,
  net: PyTree,
  target: dict[str, str],
  dtype: str = _STORED,
) -> None:
  """Writes a drafter.

  Args:
    target: fingerprint of the one that it was trained for.
    dtype: in which weights are stored.
  """
  net = jax.tree.map(multihost.whole, net)
  if not multihost.is_first():
    return
  flat = traverse_util.flatten_dict(net, sep="/")
  arrays = {name: jax.numpy.asarray(x, dtype) for name, x in flat.items()}
  if ids is not None:
    arrays[_IDS] = jax.numpy.asarray(ids, "int32")
  about = {"head_config": dataclasses.asdict(head_config), "target": target}
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  content = save_bytes(arrays, {"specdec": json.dumps(about)})
  files.replace_file(path, content)


def inspect(path: str | Path) -> HeadConfig:
  """The head config alone; errors as `load`."""
  return _open(path)[1]


def load(
  path: str | Path, target: Checkpoint | None = None, trained: bool = True
) -> Learned:
  """Reads a drafter, its weights as float32.

  Args:
    target: what it is to draft for; None: nothing is compared.
    trained: it must have been trained for this very target, not only for one
      of its shape.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no drafter, damaged, or was trained for another target.
  """
  file, head_config, about = _open(path)
  if target is not None and trained:
    found = fingerprint(target)
    said = about["target"]
    unlike = [name for name in found if found[name] != said.get(name)]
    if unlike:
      raise ValueError(
        f"{path} was trained for another target than {target.source}: unlike "
        f"{', '.join(unlike)}"
      )
  if target is not None:
    try:
      head_config.check(target.config)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error
  try:
    arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  except SafetensorError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  ids = arrays.pop(_IDS, None)
  if (0 if ids is None else len(ids)) != head_config.vocabulary:
    raise ValueError(
      f"{path} holds a vocabulary of {0 if ids is None else len(ids)} tokens; "
      f"its head config says {head_config.vocabulary}"
    )
  ids = None if ids is None else np.asarray(ids)
  if target is not None and ids is not None:
    _check_tokens(path, ids, target.config.vocab_size)
  net = traverse_util.unflatten_dict(
    {name: x.astype(jax.numpy.float32) for name, x in arrays.items()}, sep="/"
  )
  learned = Learned(head_config, ids, net, "")
  if target is not None:
    _check_shapes(path, learned, target.config)
  check_finite(net, path)
  return learned._replace(source=str(path))


def _open(path):
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist: no such drafter")
  try:
    file = safe_open(path, framework="flax")
  except SafetensorError as error:
    raise ValueError(
      f"{path} is not a complete safetensors file: {error}"
    ) from error
  try:
    about = json.loads((file.metadata() or {})["specdec"])
    # Version 0.1.0 wrote other names.
    head_config = dict(about.get("head_config") or about["recipe"])
    head_config["features"] = tuple(head_config["features"])
    if "recycle" in head_config:
      head_config["feeds_back_hidden"] = head_config.pop("recycle")
    about["target"] = dict(about["target"])
  except (KeyError, TypeError, ValueError):
    raise ValueError(
      f"{path} is no drafter: it does not say how it is made"
    ) from None
  try:
    return file, HeadConfig(**head_config), about
  except (TypeError, ValueError) as error:  # of another version, perhaps
    raise ValueError(f"{path}: {error}") from error


def _check_tokens(path, ids: np.ndarray, vocab_size: int) -> None:
  ascending = np.all(np.diff(ids) > 0)
  if not ascending or ids[0] < 0 or ids[-1] >= vocab_size:
    raise ValueError(
      f"{path} is damaged: its vocabulary is no ascending list of tokens below "
      f"{vocab_size}"
    )


def _check_shapes(path, learned: Learned, target: TransformerConfig) -> None:
  wanted = jax.eval_shape(learned.draft_head(target).init, jax.random.key(0))
  wanted, found = (
    {n: x.shape for n, x in traverse_util.flatten_dict(net, sep="/").items()}
    for net in (wanted, learned.net)
  )
  unlike = sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))
  if unlike:
    name = unlike[0]
    raise ValueError(
      f"{path} does not fit its head config: {name} is {found.get(name)} and "
      "should "
      f"be {wanted.get(name)}"
    )
