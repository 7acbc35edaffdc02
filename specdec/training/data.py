"""Text files to packed token sequences in an order that the step decides.

Invariant: `Packed.batch` is a function of (seed, step) alone, so a run that
was killed goes on with exactly the batches it would have seen.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specdec.checkpoints import Tokenizer


class Document(NamedTuple):
  """One text, and where it stood."""

  name: str
  text: str | tuple[int, ...]  # or the token ids that it was written in


def read(path: str | Path) -> list[Document]:
  """Every text under `path`, in order of names.

  Args:
    path: a folder, whose files are read at any depth; a .jsonl file of objects
      with a `text`, or `token_ids`; or any other text file. Files that are no
      UTF-8 text and hidden files are left out.

  Raises:
    FileNotFoundError: there is no such path.
    ValueError: there is no text, or a line of JSONL that holds none.
  """
  path = Path(path).expanduser()
  if not path.exists():
    raise FileNotFoundError(f"data {path} does not exist")
  files = [path]
  if path.is_dir():
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = [file.relative_to(path) for file in files]
    files = [
      file
      for file, name in zip(files, names)
      if not any(part.startswith(".") for part in name.parts)
    ]
  documents = []
  for file in files:
    name = file.relative_to(path).as_posix() if path.is_dir() else file.name
    try:
      content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
      continue
    if file.suffix == ".jsonl":
      documents += _lines(content, file)
    elif content.strip():
      documents.append(Document(name, content))
  if not documents:
    raise ValueError(f"data {path} holds no text")
  return documents


def _lines(content: str, file: Path) -> list[Document]:
  documents = []
  for number, line in enumerate(content.split("\n"), 1):
    if not line.strip():
      continue
    try:
      entry = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(
        f"line {number} of {file} is not JSON ({error.msg})"
      ) from None
    entry = entry if isinstance(entry, dict) else {}
    text = entry.get("text")
    ids = entry.get("token_ids")
    if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
      text = tuple(ids)
    elif not isinstance(text, str):
      raise ValueError(f"line {number} of {file} has no `text`")
    if text:
      documents.append(Document(f"{file.name}:{number}", text))
  return documents


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
  """One stream of ids [n] int32, an end token behind every document.

  Raises:
    ValueError: the tokenizer has no end token, or not the ids of a document.
  """
  if not tokenizer.eos_ids:
    raise ValueError("the tokenizer names no token that ends a text")
  end = tokenizer.eos_ids[0]
  stream: list[int] = []
  for name, text in documents:
    if isinstance(text, str):
      stream += tokenizer.encode(text, add_special=False)
    elif not 0 <= min(text) <= max(text) < tokenizer.vocab_size:
      raise ValueError(
        f"{name} has token {max(text)}; the tokenizer has "
        f"{tokenizer.vocab_size}: it was written by another model"
      )
    else:
      stream += text
    if stream[-1:] != [end]:  # an answer brings its own
      stream.append(end)
  return np.asarray(stream, np.int32)


class Sequences:
  """Rows [n, length + 1] served in another order every epoch.

  Attributes:
    rows: all of them; their last column is only predicted.
    length: tokens of a sequence.
    count: sequences of an epoch.
  """

  def __init__(self, rows: np.ndarray, seed: int = 0):
    self.length, self.seed = rows.shape[1] - 1, seed
    self.count = len(rows)  # of an epoch
    self.rows = rows
    self._epoch, self._order = -1, np.zeros(0, int)

  @property
  def tokens(self) -> int:
    """Tokens of one epoch."""
    return self.count * self.length

  def batch(self, step: int, size: int) -> np.ndarray:
    """[size, length + 1] ids; the last column is only predicted."""
    place = np.arange(step * size, (step + 1) * size)
    return np.stack([self._at(*divmod(int(p), self.count)) for p in place])

  def spread(self, count: int) -> np.ndarray:
    """At most `count` rows, evenly spread over the data: for evaluation."""
    chosen = np.linspace(0, len(self.rows) - 1, count).astype(int)
    return self.rows[np.unique(chosen)]

  def _at(self, epoch: int, index: int) -> np.ndarray:
    if epoch != self._epoch:
      self._epoch = epoch
      self._order = self._draw(np.random.default_rng((self.seed, epoch)))
    return self._row(self._order[index])

  def _draw(self, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(self.count)

  def _row(self, place: int) -> np.ndarray:
    return self.rows[place]


class Packed(Sequences):
  """A stream of tokens cut into sequences.

  Every epoch cuts at another offset, so that no text always begins at the same
  place of a sequence.
  """

  def __init__(self, stream: np.ndarray, length: int, seed: int = 0):
    """`stream` [n] ids; sequences of `length` tokens and the one that follows.

    Raises:
      ValueError: the stream is shorter than one sequence.
    """
    if len(stream) < length + 1:
      raise ValueError(
        f"the data has {len(stream)} tokens; one sequence takes {length + 1}"
      )
    windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)
    super().__init__(windows[::length], seed)
    self._windows = windows
    self._offsets = min(length, len(windows))  # choices of where to cut first
    self.count = 1 + (len(windows) - self._offsets) // length

  def _draw(self, rng: np.random.Generator) -> np.ndarray:
    offset = rng.integers(self._offsets)
    return offset + self.length * rng.permutation(self.count)

  def _row(self, place: int) -> np.ndarray:
    return self._windows[place]


class Numbered(Sequences):
  """Batches {tokens [b, T+1], step [b], row [b]}: for objectives that draw.

  Whatever is drawn has an address then, the step and the row of its batch, and
  a run that goes on draws what it would have drawn.
  """

  def __init__(self, data: Sequences):
    super().__init__(data.rows, data.seed)
    self.count, self._data = data.count, data

  def batch(self, step: int, size: int) -> dict[str, np.ndarray]:
    """The sequences of a step, numbered."""
    return {
      "tokens": self._data.batch(step, size),
      "step": np.full(size, step, np.int32),
      "row": np.arange(size, dtype=np.int32),
    }
