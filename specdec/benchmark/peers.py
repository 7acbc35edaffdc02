"""Other programs' engines, driven token by token: llama.cpp, transformers.

Invariant: an engine is given token ids and gives token ids, greedily and one
text at a time; its package is imported when it is loaded, and not before. What
it reads, it converts from the target's own weights.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from specdec import checkpoints
from specdec.checkpoints import fetch

_PIECE = 512  # tokens that llama.cpp reads at once


class Engine(Protocol):
  """A language model that remembers what it has read."""

  def read(self, ids: Sequence[int]) -> None:
    """Forgets everything, then reads these tokens, which may be none."""

  def step(self, ids: Sequence[int]) -> int:
    """Reads further tokens in one pass, with logits at each of them, and
    returns the likeliest token after the last."""

  def rewind(self, length: int) -> None:
    """Forgets all but the first `length` tokens."""


class Peer(NamedTuple):
  """An engine that may be installed.

  Attributes:
    packages: name on the package index by name of the module.
    load: takes the target's source, the positions that one text needs and the
      number of threads; raises ValueError where it cannot read such a source.
  """

  packages: Mapping[str, str]
  load: Callable[[Path, int, int], Engine]

  @property
  def missing(self) -> str | None:
    """What to install, if anything."""
    specs = map(importlib.util.find_spec, self.packages)
    if None not in specs:
      return None
    return f"not installed: pip install {' '.join(self.packages.values())}"

  @property
  def versions(self) -> dict[str, str]:
    """The installed packages' versions."""
    names = self.packages.values()
    return {name: importlib.metadata.version(name) for name in names}


def _converted(source: Path, name: str, write: Callable[[Path], None]) -> Path:
  """Returns a file or folder made from a file; `write` makes it, once."""
  folder = fetch.cache_folder() / "peers" / fetch.sha256(source)[:16]
  path = folder / name
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
      write(Path(scratch) / name)
      (Path(scratch) / name).rename(path)
  return path


class _LlamaCpp:
  """llama.cpp with its default settings; its KV cache is in float16."""

  def __init__(self, weights: str, source: Path, slots: int, threads: int):
    if source.suffix != ".gguf":
      raise ValueError(f"it reads GGUF, and {source} is none")
    import llama_cpp

    quantize = functools.partial(_requantize, source, weights)
    path = _converted(source, f"{source.stem}.{weights}.gguf", quantize)
    self._api = llama_cpp
    self._model = llama_cpp.Llama(
      str(path),
      n_ctx=slots,
      n_batch=_PIECE,
      n_threads=threads,
      n_threads_batch=threads,
      verbose=False,
    )
    self._batch = llama_cpp.llama_batch_init(_PIECE, 0, 1)
    self._length = 0

  def _decode(self, ids: Sequence[int], logits: bool) -> None:
    batch, position = self._batch, self._length
    for i, token in enumerate(ids):
      batch.token[i], batch.pos[i] = token, position + i
      batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
      batch.logits[i] = logits
    batch.n_tokens = len(ids)
    if code := self._api.llama_decode(self._model.ctx, batch):
      raise RuntimeError(f"llama_decode returned {code}")
    self._length += len(ids)

  def read(self, ids: Sequence[int]) -> None:
    self.rewind(0)
    for first in range(0, len(ids), _PIECE):
      self._decode(ids[first : first + _PIECE], logits=False)

  def step(self, ids: Sequence[int]) -> int:
    self._decode(ids, logits=True)
    logits = self._api.llama_get_logits_ith(self._model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, (self._model.n_vocab(),)).argmax())

  def rewind(self, length: int) -> None:
    memory = self._api.llama_get_memory(self._model.ctx)
    if not self._api.llama_memory_seq_rm(memory, -1, length, -1):
      raise RuntimeError("llama.cpp cannot rewind the cache of this model")
    self._length = length


def _requantize(source: Path, weights: str, path: Path) -> None:
  """Writes a GGUF file with all matrices in F32 or Q8_0."""
  import llama_cpp

  types = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
  }
  options = llama_cpp.llama_model_quantize_default_params()
  options.ftype, options.allow_requantize = types[weights], True
  files = str(source).encode(), str(path).encode()
  logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
  if llama_cpp.llama_model_quantize(*files, ctypes.byref(options)):
    raise ValueError(f"{source} could not be written in {weights}")


class _Transformers:
  """Transformers in float32, without the overhead of its generate()."""

  def __init__(self, source: Path, slots: int, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    if source.is_file():
      source = _converted(
        source, "transformers", functools.partial(_save, source)
      )
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    self._torch, self._new = torch, transformers.DynamicCache
    self._model, self._cache = model.float().eval(), self._new()

  def _decode(self, ids: Sequence[int], keep: int):
    with self._torch.inference_mode():
      return self._model(
        input_ids=self._torch.tensor([list(ids)]),
        past_key_values=self._cache,
        use_cache=True,
        logits_to_keep=keep,
      ).logits

  def read(self, ids: Sequence[int]) -> None:
    self._cache = self._new()
    if ids:
      self._decode(ids, keep=1)

  def step(self, ids: Sequence[int]) -> int:
    return int(self._decode(ids, keep=len(ids))[0, -1].argmax())

  def rewind(self, length: int) -> None:
    if surplus := self._cache.get_seq_length() - length:
      self._cache.crop(-surplus)


def _save(source: Path, folder: Path) -> None:
  """Writes a checkpoint in Hugging Face's layout, in float32."""
  checkpoint = checkpoints.load(source)
  checkpoints.save_safetensors(folder, checkpoint.params, checkpoint.config)


_LLAMA_CPP = {"llama_cpp": "llama-cpp-python"}
PEERS: Mapping[str, Peer] = {
  "llama.cpp-F32": Peer(_LLAMA_CPP, functools.partial(_LlamaCpp, "F32")),
  "llama.cpp-Q8_0": Peer(_LLAMA_CPP, functools.partial(_LlamaCpp, "Q8_0")),
  "transformers": Peer(
    {"torch": "torch", "transformers": "transformers"}, _Transformers
  ),
}


class Loaded(NamedTuple):
  """Engines by name, their versions, and why others were left out."""

  engines: dict[str, Engine]
  versions: dict[str, str]
  left_out: list[str]


def load(
  names: Sequence[str], source: Path, slots: int, threads: int
) -> Loaded:
  """Loads those of PEERS that are installed and read such a source."""
  loaded = Loaded({}, {}, [])
  for name in names:
    peer = PEERS[name]
    try:
      if peer.missing:
        raise ValueError(peer.missing)
      loaded.engines[name] = peer.load(source, slots, threads)
      loaded.versions.update(peer.versions)
    except (ImportError, RuntimeError, ValueError) as error:
      loaded.left_out.append(f"{name} was left out: {error}")
  return loaded
