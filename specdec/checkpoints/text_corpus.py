"""A file of texts that a model wrote, for the suffix drafter to copy from.

An .npz of token ids, bound to one vocabulary: a target with another refuses it.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from specdec.checkpoints.tokenizer import Tokenizer
from specdec.utils import files

_VERSION = 1
_FIELDS = ("version", "vocab_size", "vocabulary", "tokens", "lengths")
# What NumPy and zipfile raise of damaged files and of others'.
_UNREADABLE = (
  ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile,
  zlib.error,
)  # fmt: skip


def _vocabulary(tokenizer: Tokenizer | None) -> str:
  """A hash of a tokenizer's tokens; '' without one."""
  if tokenizer is None:
    return ""
  text = "\0".join("" if x is None else x for x in tokenizer.tokens)
  return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def load(
  path: str | os.PathLike, vocab_size: int, tokenizer: Tokenizer | None = None
) -> list[list[int]]:
  """Reads the texts of a file that `add` wrote.

  Args:
    vocab_size: of the target.
    tokenizer: the target's; None: only the size is compared.

  Raises:
    ValueError: it is no such file, a pipe, or of another vocabulary.
    FileNotFoundError: it is not there.
  """
  file = Path(path).expanduser()
  if files.is_stream(file):
    raise ValueError(f"{path} is no regular file; a corpus is read repeatedly")
  content = file.read_bytes()
  try:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
      version, size, vocabulary, tokens, lengths = (file[x] for x in _FIELDS)
    for name, array in (("tokens", tokens), ("lengths", lengths)):
      if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} are {array.dtype}{list(array.shape)}")
    if int(version) != _VERSION or lengths.sum() != tokens.size:
      raise ValueError(f"version {int(version)}, {tokens.size} tokens")
    if (lengths < 0).any():
      raise ValueError("a text of less than no token")
    size, vocabulary = int(size), str(vocabulary)
  except _UNREADABLE as e:
    # NumPy would advise to unpickle what is no archive.
    why = "" if "allow_pickle" in str(e) else f" ({e})"
    raise ValueError(
      f"{path} is no corpus of texts, as --save_corpus writes it{why}"
    ) from None
  if size != vocab_size:
    raise ValueError(
      f"{path} holds texts over {size} token ids, and the target has "
      f"{vocab_size}: a corpus serves the vocabulary that it was written with"
    )
  ours = _vocabulary(tokenizer)
  if ours and vocabulary and ours != vocabulary:
    raise ValueError(
      f"{path} holds texts of another tokenizer than the target's, of as many "
      "tokens: a corpus serves the vocabulary that it was written with"
    )
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < size:
    raise ValueError(f"{path} holds token ids outside 0..{size - 1}")
  ends = np.cumsum(lengths)[:-1]
  return [part.tolist() for part in np.split(tokens, ends) if part.size]


def check(
  path: str | None, vocab_size: int, tokenizer: Tokenizer | None = None
) -> None:
  """Raises ValueError where `add` would: before there is anything to add."""
  if path is not None and Path(path).expanduser().exists():
    load(path, vocab_size, tokenizer)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
  """Waits for other programs that add to a corpus in this folder."""
  with contextlib.ExitStack() as stack:
    # The folder itself is locked: a file is replaced, and a lock file stays.
    with contextlib.suppress(OSError):  # a file system without locks
      place = os.open(folder, os.O_RDONLY)
      stack.callback(os.close, place)
      fcntl.flock(place, fcntl.LOCK_EX)
    yield


def add(
  path: str | os.PathLike,
  texts: Iterable[Sequence[int]],
  vocab_size: int,
  tokenizer: Tokenizer | None = None,
) -> int:
  """Adds texts to a file, each once, or begins one; replaces it atomically.

  Programs that add to one file at the same time wait for each other.

  Returns:
    How many texts it now holds.

  Raises:
    ValueError: the file is something else, or of another vocabulary.
  """
  path = Path(path).expanduser()
  with _alone(path.parent):
    held = load(path, vocab_size, tokenizer) if path.exists() else []
    kept = dict.fromkeys(tuple(map(int, x)) for x in (*held, *texts) if len(x))
    parts = [np.asarray(text, np.int32) for text in kept]
    buffer = io.BytesIO()
    np.savez(
      buffer,
      version=_VERSION,
      vocab_size=vocab_size,
      vocabulary=_vocabulary(tokenizer),
      tokens=np.concatenate([np.zeros(0, np.int32), *parts]),
      lengths=np.array([len(part) for part in parts], np.int32),
    )
    files.replace_file(path, buffer.getvalue())
    return len(parts)
