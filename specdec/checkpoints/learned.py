"""Saves and loads trained drafters as self-describing safetensors files.

The file's metadata hold the HeadConfig and the fingerprint of the target. A
folder instead of a file is a drafter in somebody else's format (formats/).
Invariant: a file is renamed into place once it is complete, so that an
interrupted write leaves the previous file.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.flax import save as save_bytes

from specdec import drafters, multihost
from specdec.checkpoints import formats, hub, shipped, tokenizer
from specdec.checkpoints.huggingface import open_safetensors
from specdec.checkpoints.loading import Checkpoint, check_finite
from specdec.drafters.heads.block_head import AnyHead
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import layouts
from specdec.models.config import TransformerConfig
from specdec.models.params import cast
from specdec.models.quantization import Quantized
from specdec.sharding import Placement
from specdec.types import Array, PyTree
from specdec.utils import files, remote
from specdec.utils.spelling import naming

SUFFIX = ".safetensors"
_IDS, _STORED = "vocabulary", "bfloat16"
# Files of drafters that programs write into a folder.
_OWN = "drafter.safetensors", "best.safetensors", "last.safetensors"
_SAMPLE = 256  # values of each tensor that enter a fingerprint


class Learned(NamedTuple):
  """A trained drafter, as saved."""

  head_config: HeadConfig
  ids: np.ndarray | None  # [n] ids of the tokens that it can draft; None: all
  net: PyTree  # float32 weights

  def draft_head(
    self, target: TransformerConfig, place: Placement | None = None
  ) -> AnyHead:
    """Builds the draft head for a target."""
    make = drafters.LEARNED[self.head_config.kind]
    return make(self.head_config, target, self.ids, place)


# Options of a config that files of older versions know nothing of: they are
# hashed where they are in use.
_NEWER = "gated", "relative_buckets", "relative_distance", "scale_logits"
_NEWER += "encoder_layers", "start_token", "rotary_dims"
_NEWER += "unrotated_layers", "fused", "joint_qk_norm", "pre_norms"
_NEWER += "mask_token", "recurrence", "attention_gate"
_NEWER += "shared_width", "shared_gate", "o_bias", "attention_sinks"
_NEWER += "swiglu_limit", "expert_biases", "rope_interleaved", "chunked"
_NEWER += "unrotated_growth", "unrotated_floor", "unit_qk_norm"
_NEWER += "route_inputs", "dense_layers", "dense_width"
_NEWER += "latent", "routing"


def fingerprint(target: Checkpoint) -> dict[str, str]:
  """Hashes the config, tokenizer and weights of a drafter's target.

  Samples some values of every tensor and rounds them to bfloat16, so that the
  dtype a target is loaded in makes no difference; integers stand for other
  weights, and are left out. Of the tokenizer only the vocabulary enters.
  """
  defaults = {x.name: x.default for x in dataclasses.fields(target.config)}
  config = {
    name: value
    for name, value in dataclasses.asdict(target.config).items()
    if name not in ("dtype", "weights", "kv")
    and not (name in _NEWER and value == defaults[name])
  }
  if target.config.recurrence:  # the number of slots changes nothing
    del config["recurrence"]["num_nodes"]
  weights = hashlib.sha256()
  flat = traverse_util.flatten_dict(target.params, sep="/")
  for name in sorted(flat):
    leaf = flat[name]
    if isinstance(leaf, Quantized):
      continue
    size = int(np.prod(leaf.shape))
    chosen = np.linspace(0, size - 1, min(size, _SAMPLE)).astype(int)
    values = multihost.whole(leaf[np.unravel_index(chosen, leaf.shape)])
    weights.update(f"{name}{leaf.shape}".encode())
    weights.update(np.asarray(values, jax.numpy.bfloat16).tobytes())
  tokens = target.tokenizer.tokens if target.tokenizer else ()
  hashes = {
    "config": _hash(json.dumps(config, sort_keys=True)),
    "tokenizer": _hash(json.dumps(list(tokens))),
    "weights": weights.hexdigest()[:16],
  }
  if any(isinstance(leaf, Quantized) for leaf in flat.values()):
    del hashes["weights"]
  return hashes


def _hash(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(net: PyTree) -> PyTree:
  """Rounds weights as `save` and `load` do."""
  return cast(cast(net, _STORED), "float32")


def save(
  path: str | Path,
  head_config: HeadConfig,
  ids: np.ndarray | None,
  net: PyTree,
  target: dict[str, str],
  dtype: str = _STORED,
) -> None:
  """Writes a trained drafter.

  Args:
    ids: [n] ids of the tokens that it can draft, ascending; None: all.
    target: fingerprint of the target that it was trained for.
    dtype: of the stored weights.
  """
  net = jax.tree.map(multihost.whole, net)
  if not multihost.is_first():
    return
  arrays = traverse_util.flatten_dict(cast(net, dtype), sep="/")
  if ids is not None:
    arrays[_IDS] = jax.numpy.asarray(ids, "int32")
  metadata = {"head_config": dataclasses.asdict(head_config), "target": target}
  path = remote.as_path(path)
  files.make_folder(path.parent)
  content = save_bytes(arrays, {"specdec": json.dumps(metadata)})
  files.replace_file(path, content)


def resolve(name: str) -> Path:
  """Returns the file or folder of a drafter: a path, or the name of one.

  Raises:
    FileNotFoundError: neither a file, a folder, one of ours nor on the hub.
  """
  path = Path(name).expanduser()
  if path.is_dir():
    return path
  if path.exists() or name in shipped.drafters() or not hub.is_hub_name(name):
    return shipped.drafter(name)
  return hub.snapshot(name, formats.PATTERNS)


def inspect(
  path: str | Path, target: TransformerConfig | None = None
) -> HeadConfig:
  """Reads only the head config; raises as `load`.

  Args:
    target: decides on what the formats of others leave to it.
  """
  if Path(path).is_dir():
    _refuse_ours(Path(path))
    return formats.inspect(Path(path), target)
  return _open(path)[1]


def load(
  path: str | Path,
  target: Checkpoint | None = None,
  trained: bool = True,
  actual: dict[str, str] | None = None,
) -> Learned:
  """Reads a trained drafter, with float32 weights.

  Args:
    path: its file, or a folder in one of the formats of others.
    target: the model to draft for; None skips all checks against it, and only
      of a file.
    trained: whether the drafter must have been trained for this very target,
      not just for a model of its shape.
    actual: the target's fingerprint, taken before its weights were packed.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is not a drafter, is damaged, or was trained for
      another target.
  """
  if Path(path).is_dir():
    return _load_folder(Path(path), target)
  file, head_config, fingerprinted = _open(path)
  if target is not None and trained:
    actual = actual or fingerprint(target)
    differing = [key for key in actual if actual[key] != fingerprinted.get(key)]
    if differing:
      raise ValueError(
        f"{path} was trained for another target than {target.source}: "
        f"different {', '.join(differing)}"
      )
  if target is not None:
    with naming(str(path)):
      head_config.check(target.config)
  try:
    arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  except SafetensorError as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  ids = np.asarray(arrays.pop(_IDS, ()))
  if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
    raise ValueError(
      f"{path} is damaged: its vocabulary is {ids.dtype.name} of shape "
      f"{ids.shape}; it must be a list of tokens"
    )
  ids = ids.astype(np.int64)  # differences of unsigned ones would wrap
  if len(ids) != head_config.vocabulary:
    raise ValueError(
      f"{path} holds a vocabulary of {len(ids)} tokens; its head config "
      f"requires {head_config.vocabulary}"
    )
  if target is not None and len(ids):
    size = target.config.vocab_size
    if not (np.all(np.diff(ids) > 0) and ids[0] >= 0 and ids[-1] < size):
      raise ValueError(
        f"{path} is damaged: its vocabulary is not an ascending list of tokens "
        f"below {size}"
      )
  for name, x in arrays.items():
    if not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
      raise ValueError(f"{path} is damaged: {name} is {x.dtype.name}, no float")
    if any(other.startswith(f"{name}/") for other in arrays):
      raise ValueError(f"{path} is damaged: {name} is a tensor and a folder")
  net = traverse_util.unflatten_dict(
    {name: x.astype(jax.numpy.float32) for name, x in arrays.items()}, sep="/"
  )
  learned = Learned(head_config, ids if len(ids) else None, net)
  if target is not None:
    head = learned.draft_head(target.config)
    expected, stored = (
      traverse_util.flatten_dict(jax.tree.map(np.shape, tree), sep="/")
      for tree in (jax.eval_shape(head.init, jax.random.key(0)), net)
    )
    for name in sorted({*expected, *stored}):
      if expected.get(name) != stored.get(name):
        raise ValueError(
          f"{path} does not match its head config: {name} is "
          f"{stored.get(name)} and should be {expected.get(name)}"
        )
  check_finite(net, path)
  return learned


def _refuse_ours(folder: Path) -> None:
  """Raises ValueError for a folder of training, which names the file in it."""
  ours = [x for x in _OWN if (folder / x).is_file()]
  if ours and not (folder / "config.json").is_file():
    raise ValueError(
      f"{folder} holds drafters of ours: name {folder / ours[0]}"
    )


def _load_folder(folder: Path, target: Checkpoint) -> Learned:
  """Reads a drafter in somebody else's format."""
  _refuse_ours(folder)
  own = tokenizer.from_directory(folder)
  tokens = target.config.vocab_size
  with naming(str(folder)):
    tokenizer.check_vocabulary(tokens, tokens, target.tokenizer, own)
  drafter = formats.load(folder, target.config)
  check_finite(drafter.net, folder)
  head_config, net = drafter.stored.head_config, drafter.net
  if head_config.block:
    head_config, net = _without_copies(head_config, net, target.params)
  return Learned(head_config, drafter.ids, net)


def _without_copies(
  head_config: HeadConfig, net: PyTree, target: PyTree
) -> tuple[HeadConfig, PyTree]:
  """Leaves out tables that are the target's, bit by bit, as of DeepSpec.

  Where the target's are integers or lie on several hosts they stay.
  """
  kept, shared = dict(net), {}
  for option, name, table in _tables_of(target):
    own = kept.get(name, {}).get("weight")
    if isinstance(table, Quantized) or not table.is_fully_addressable:
      continue
    if own is None:
      continue
    if np.array_equal(own, layouts.unpack(table).astype(own.dtype)):
      shared[option] = "shared"
      del kept[name]
  return dataclasses.replace(head_config, **shared), kept


def with_copies(
  head_config: HeadConfig, net: PyTree, target: PyTree
) -> tuple[HeadConfig, PyTree]:
  """Adds the target's tables where a drafter takes them from the target.

  Args:
    target: weights in one piece, as they are loaded without a mesh.
  """
  copies = {
    name: {"weight": layouts.unpack(table)}
    for option, name, table in _tables_of(target)
    if getattr(head_config, option) == "shared"
  }
  owned = dataclasses.replace(head_config, embed="own", head="own")
  return owned, {**net, **copies}


def _tables_of(target: PyTree) -> tuple[tuple[str, str, Array], ...]:
  """Returns, of the embedding and the vocabulary projection, the option of a
  HeadConfig, the name in a drafter's weights and the target's table."""
  embed = target["embed"]["weight"]
  head = target.get("head", target["embed"])["weight"]
  return ("embed", "embed_table", embed), ("head", "head", head)


def _open(path):
  """Returns the file, the head config and the fingerprint of its target."""
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"drafter {path} does not exist")
  file = open_safetensors(path, "flax")
  try:
    metadata = json.loads((file.metadata() or {})["specdec"])
    # Files of version 0.1.0 have other keys.
    head_config = dict(metadata.get("head_config") or metadata["recipe"])
    head_config["features"] = tuple(head_config["features"])
    if "recycle" in head_config:
      head_config["feeds_back_hidden"] = head_config.pop("recycle")
    target = dict(metadata["target"])
  except (AttributeError, KeyError, TypeError, ValueError):
    raise ValueError(
      f"{path} is not a drafter: its metadata have no head config"
    ) from None
  try:
    return file, HeadConfig(**head_config), target
  except (TypeError, ValueError) as error:  # possibly of another version
    raise ValueError(f"{path}: {error}") from error
