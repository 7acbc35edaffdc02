"""Reads text files and packs their tokens into training sequences.

An encoder-decoder learns from pairs, a source and the text to write from it,
each in a row of its own.

Invariant: a batch is a function of (seed, step), so that a resumed run sees
exactly the batches of an uninterrupted one.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from specdec import checkpoints
from specdec.checkpoints import Tokenizer
from specdec.checkpoints.fetch import fetch
from specdec.training.options import Options
from specdec.types import Array, PyTree, Source
from specdec.utils import remote, terminal


class Document(NamedTuple):
  """One text and its origin."""

  name: str  # relative path of its file, with the line number in JSON lines
  text: str | tuple[int, ...]  # or token ids
  source: str | None = None  # that the text is written from


class Pairs(NamedTuple):
  """A batch for an encoder-decoder."""

  source: Source
  tokens: Array  # [B, T+1]: a start token, a text and its end, padding
  length: Array  # [B] how many of the T labels count


def read(path: str | Path) -> list[Document]:
  """Reads every text under `path`, sorted by name.

  Args:
    path: a folder, whose files are read recursively; a .jsonl file of objects
      with `text` or `token_ids`, and `source` for an encoder-decoder; or any
      other text file. Hidden files and files that are not valid UTF-8 are
      skipped.

  Raises:
    FileNotFoundError: the path does not exist.
    ValueError: there is no text, or a JSON line without one.
  """
  remote.check_local("data", path)
  path = Path(path).expanduser()
  if not path.exists():
    raise FileNotFoundError(
      f"data {path} does not exist; prepare_data.py makes a corpus, and of it "
      "pairs for an encoder-decoder"
    )
  documents, files = [], [path]
  if path.is_dir():
    files = sorted(file for file in path.rglob("*") if file.is_file())
  for file in files:
    name = file.relative_to(path if path.is_dir() else path.parent)
    if path.is_dir() and any(part.startswith(".") for part in name.parts):
      continue
    try:
      content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
      continue
    if file.suffix == ".jsonl":
      documents += _lines(content, file)
    elif content.strip():
      documents.append(Document(name.as_posix(), content))
  if not documents:
    raise ValueError(f"data {path} has no text")
  return documents


def _lines(content: str, file: Path) -> Iterator[Document]:
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
    text, ids = entry.get("text"), entry.get("token_ids")
    if isinstance(ids, list) and all(isinstance(i, int) for i in ids):
      text = tuple(ids)
    elif not isinstance(text, str):
      raise ValueError(f"line {number} of {file} has no `text`")
    if text:
      yield Document(f"{file.name}:{number}", text, entry.get("source"))


def read_texts(path: str | Path) -> list[str]:
  """Reads texts alone; raises ValueError for token ids."""
  documents = read(path)
  for document in documents:
    if not isinstance(document.text, str):
      raise ValueError(f"{document.name} of {path} has token ids; give text")
  return [document.text for document in documents]


def load(
  data: str,
  held_out: str,
  options: Options,
  tokenizer: Tokenizer,
  first_token: int | None = None,
) -> tuple["Sequences", "Sequences"]:
  """Reads, tokenizes and packs training and held-out texts.

  Args:
    first_token: of an encoder-decoder, whose texts have sources and are not
      packed; None for a decoder.

  Raises:
    FileNotFoundError: a path does not exist.
    ValueError: one has too little text.
  """

  def pack(name: str, path: str, seed: int) -> Sequences:
    documents = read(path)
    if first_token is not None:
      pairs = pair(documents, tokenizer, first_token, options)
      sources = pairs.source.length.sum()
      terminal.report(
        f"{name}: {len(documents):,} pairs of {path}, {sources:,} tokens of "
        f"sources and {pairs.length.sum():,} of texts",
        sys.stderr,
      )
      return Sequences(pairs, seed)
    ids = tokenize(documents, tokenizer)
    try:
      packed = Packed(ids, options.sequence, seed)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from None
    terminal.report(f"{name}: {len(ids):,} tokens of {path}", sys.stderr)
    return packed

  return pack("data", data, options.seed), pack("held_out", held_out, 0)


def load_tokenizer(name: str, vocab_size: int) -> Tokenizer:
  """Loads a tokenizer; raises ValueError if it has more than `vocab_size`."""
  tokenizer = checkpoints.load_tokenizer(fetch(name))
  if tokenizer.vocab_size > vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} tokens and the model "
      f"{vocab_size}; the model needs a row for each"
    )
  return tokenizer


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
  """Concatenates the tokens of documents, each followed by an end token.

  Returns:
    [n] int32 ids.

  Raises:
    ValueError: the tokenizer has no end token, or a document has token ids
      outside its vocabulary.
  """
  if not tokenizer.eos_ids:
    raise ValueError("the tokenizer has no end token")
  end = tokenizer.eos_ids[0]
  texts = [x.text for x in documents if isinstance(x.text, str)]
  encoded = tokenizer.encode_many(texts)
  ids: list[int] = []
  for name, text, _ in documents:
    if isinstance(text, str):
      ids += next(encoded)
    elif not 0 <= min(text) <= max(text) < tokenizer.vocab_size:
      wrong = min(text) if min(text) < 0 else max(text)
      raise ValueError(
        f"{name} has token {wrong}; the tokenizer has {tokenizer.vocab_size}: "
        "it was written by another model"
      )
    else:
      ids += text
    if ids[-1:] != [end]:  # model outputs already end with it
      ids.append(end)
  return np.asarray(ids, np.int32)


def pair(
  documents: Sequence[Document],
  tokenizer: Tokenizer,
  first_token: int,
  options: Options,
) -> Pairs:
  """Tokenizes sources and texts, each cut where a row of `options` ends.

  Raises:
    ValueError: the tokenizer has no end token, or a document is no pair.
  """
  if not tokenizer.eos_ids:
    raise ValueError("the tokenizer has no end token")
  end = tokenizer.eos_ids[0]
  sources, texts = [], []
  for name, text, source in documents:
    if not (isinstance(source, str) and isinstance(text, str) and source):
      raise ValueError(
        f"{name} has no `source` and `text`; an encoder-decoder learns from "
        "pairs (prepare_data.py --make=pairs)"
      )
    sources.append(tokenizer.encode(source))
    ids = tokenizer.encode(text, add_special=False)
    texts.append([first_token, *ids, end])
  source, source_length = _padded(sources, options.source, end)
  tokens, length = _padded(texts, options.sequence + 1, end)
  return Pairs(Source(source, source_length), tokens, length - 1)


def _padded(
  rows: Sequence[Sequence[int]], size: int, padding: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns rows cut or padded to [n, size], and their lengths [n]."""
  result = np.full((len(rows), size), padding, np.int32)
  length = np.asarray([min(len(row), size) for row in rows], np.int32)
  for i, row in enumerate(rows):
    result[i, : length[i]] = row[:size]
  return result, length


class Sequences:
  """Sequences in batches, shuffled anew every epoch.

  Attributes:
    rows: [n, length + 1] ids, of which the last column is only a label; or
      Pairs of n.
    content: all that sequences are made of, for a checksum.
    length: tokens in a sequence.
    count: sequences in an epoch.
    tokens: in an epoch, without labels.
  """

  def __init__(self, rows: PyTree, seed: int = 0):
    self.rows, self.seed = rows, seed
    self.content = rows
    ids = rows.tokens if isinstance(rows, Pairs) else rows
    self.count, self.length = len(ids), ids.shape[1] - 1
    self._windows = rows  # of which an epoch serves some
    self._epoch, self._order = -1, np.zeros(0, int)

  @property
  def tokens(self) -> int:
    return self.count * self.length

  def batch(self, step: int, size: int) -> PyTree:
    """Returns the batch of a step: ids [size, length + 1], or Pairs."""
    indices = self._indices(step, size)
    return jax.tree.map(lambda x: x[indices], self._windows)

  def evenly_spaced(self, count: int) -> PyTree:
    """Returns at most `count` evenly spaced rows, for evaluation."""
    last = len(jax.tree.leaves(self.rows)[0]) - 1
    chosen = np.linspace(0, last, min(count, last + 1)).astype(int)
    return jax.tree.map(lambda x: x[chosen], self.rows)

  def _indices(self, step: int, size: int) -> list[int]:
    """Returns the index of every sequence of a batch."""
    indices = []
    for i in range(step * size, (step + 1) * size):
      epoch, index = divmod(i, self.count)
      if epoch != self._epoch:
        self._epoch = epoch
        self._order = self._draw(np.random.default_rng((self.seed, epoch)))
      indices.append(int(self._order[index]))
    return indices

  def _draw(self, rng: np.random.Generator) -> np.ndarray:
    """Orders the sequences of an epoch."""
    return rng.permutation(self.count)


class Packed(Sequences):
  """Tokens packed into sequences, in every epoch from another offset.

  So the position of a text within its sequence varies.
  """

  def __init__(self, ids: np.ndarray, length: int, seed: int = 0):
    """Packs [n] ids into sequences of `length` tokens and one label.

    Raises:
      ValueError: there are fewer tokens than one sequence takes.
    """
    if len(ids) < length + 1:
      raise ValueError(
        f"the data has {len(ids)} tokens; one sequence takes {length + 1}"
      )
    windows = np.lib.stride_tricks.sliding_window_view(ids, length + 1)
    super().__init__(windows[::length], seed)
    self.content = ids
    self._windows = windows
    self._num_offsets = min(length, len(self._windows))
    self.count = 1 + (len(self._windows) - self._num_offsets) // length

  def _draw(self, rng: np.random.Generator) -> np.ndarray:
    offset = rng.integers(self._num_offsets)
    return offset + self.length * rng.permutation(self.count)


def draws(
  batch: dict[str, Array], seed: int, draw: Callable[[Array], Array]
) -> Array:
  """Returns draw(key) of every row of a `Numbered` batch, by its address."""

  def of_row(step, row):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return draw(jax.random.fold_in(key, row))

  return jax.vmap(of_row)(batch["step"], batch["row"])


class Numbered(Sequences):
  """Batches {tokens [b, T+1], step [b], row [b]}, for stochastic objectives.

  What batches of training/hidden.py hold besides goes along. Step and row are
  the address of an objective's noise, so that a resumed run draws the same
  numbers.
  """

  def __init__(self, data: Sequences):
    super().__init__(data.rows, data.seed)
    self.count, self.content, self._data = data.count, data.content, data

  def batch(self, step: int, size: int) -> dict[str, PyTree]:
    """Returns the batch of a step with its addresses."""
    batch = self._data.batch(step, size)
    batch = batch if isinstance(batch, dict) else {"tokens": batch}
    return batch | {
      "step": np.full(size, step, np.int32),
      "row": np.arange(size, dtype=np.int32),
    }
