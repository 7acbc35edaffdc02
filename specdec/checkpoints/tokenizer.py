"""Tokenizer with chat templates and streaming of text.

Invariant: the concatenation of streamed pieces equals `decode` of all ids,
wherever that is valid UTF-8.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers

from specdec.checkpoints import huggingface, shipped
from specdec.checkpoints.chat_template import Renderer
from specdec.utils import files, remote

_TEXTS = 256  # encoded at once


class Tokenizer:
  """A `tokenizers.Tokenizer` with a checkpoint's special tokens and template.

  Args:
    special: text of 'bos_token', 'eos_token' and others, as far as defined.
    eos_ids: tokens that end a text.
    chat_template: Jinja source, or None.
    limit: rows of the model's embedding: `encode` rejects ids at or above it.
  """

  def __init__(
    self,
    inner: tokenizers.Tokenizer,
    *,
    special: Mapping[str, str] | None = None,
    eos_ids: Sequence[int] = (),
    chat_template: str | None = None,
    limit: int | None = None,
  ):
    self.inner = inner  # to be read only
    self.special = dict(special or {})
    self.eos_ids = tuple(eos_ids)
    self.chat_template = chat_template
    self.limit = limit
    self._renderer = Renderer()

  @functools.cached_property
  def tokens(self) -> tuple[str | None, ...]:
    """Token of every id as in the vocabulary; None for unassigned ids."""
    vocabulary = self.inner.get_vocab(with_added_tokens=True)
    strings: list = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
      strings[index] = token
    return tuple(strings)

  @property
  def vocab_size(self) -> int:
    """One more than the highest id, including added tokens."""
    return len(self.tokens)

  def encode(self, text: str, add_special: bool = True) -> list[int]:
    """Returns the ids of a text, by default with special tokens around it.

    Raises ValueError for a token without an embedding, or half of a surrogate
    pair.
    """
    return self._checked(
      [text], lambda x: [self.inner.encode(*x, add_special_tokens=add_special)]
    )[0]

  def encode_many(self, texts: Sequence[str]) -> Iterator[list[int]]:
    """Yields as `encode` does for each text, without special tokens.

    Several threads encode them, a few texts at a time.
    """
    encode = functools.partial(
      self.inner.encode_batch, add_special_tokens=False
    )
    for first in range(0, len(texts), _TEXTS):
      yield from self._checked(texts[first : first + _TEXTS], encode)

  def _checked(self, texts: Sequence[str], encode: Callable) -> list[list[int]]:
    """Returns the ids that `encode` gives texts; raises as `encode` does."""
    for text in texts:
      try:
        text.encode("utf-8")
      except UnicodeEncodeError as error:
        raise ValueError(
          f"the text holds {text[error.start]!a}, half of a surrogate pair, at "
          f"character {error.start}"
        ) from None
    rows = [x.ids for x in encode(texts)]
    for ids in rows:
      if self.limit is not None and max(ids, default=-1) >= self.limit:
        raise ValueError(
          f"token {self.tokens[max(ids)]!r} has id {max(ids)}; the model's "
          f"embedding has {self.limit} rows"
        )
    return rows

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Returns the text of ids, by default without special tokens."""
    ids = [int(index) for index in ids]
    return self.inner.decode(ids, skip_special_tokens=skip_special)

  def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the ids of messages {'role': ..., 'content': ...}.

    Raises ValueError where there is no chat template, or it rejects the
    messages, fails or takes too long.
    """
    if self.chat_template is None:
      raise ValueError("this tokenizer has no chat template; use encode")
    text = self._renderer.render(self.chat_template, messages, self.special)
    return self.encode(text, add_special=False)  # the template writes them

  def save(self, directory: str | Path, first_token: int | None = None) -> None:
    """Writes the files that `from_directory` and transformers read.

    Args:
      first_token: with which an encoder-decoder's output begins.
    """
    directory = remote.as_path(directory)
    files.make_folder(directory)
    files.replace_file(directory / "tokenizer.json", self.inner.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
    config["clean_up_tokenization_spaces"] = False
    objects = {"tokenizer_config.json": config}
    generation = {}
    if self.eos_ids:
      generation["eos_token_id"] = list(self.eos_ids)
    if first_token is not None:
      generation["decoder_start_token_id"] = first_token
      generation["pad_token_id"] = first_token
    if generation:
      objects["generation_config.json"] = generation
    for name, content in objects.items():
      text = json.dumps(content, indent=2) + "\n"
      files.replace_file(directory / name, text)
    if self.chat_template is not None:
      files.replace_file(directory / "chat_template.jinja", self.chat_template)


class TextStream:
  """Decodes a growing list of ids into text without splitting characters.

  Text that ends with U+FFFD, an incomplete character, is held back. Each step
  decodes only the tokens held back and those of the previous piece, because
  some decoders treat the first token of a text differently.

  Byte-fallback decoders (SentencePiece) turn a whole run of byte tokens into
  U+FFFD if one character in it is invalid; text emitted before stays.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._decode = tokenizer.decode
    self._ids: list[int] = []  # of the previous piece, then those held back
    self._num_emitted = 0  # how many of them belong to the previous piece

  def push(self, ids: Iterable[int]) -> str:
    """Appends ids and returns the text that they complete, often ''."""
    text = ""
    for index in ids:
      self._ids.append(int(index))
      piece = self._pending()
      if piece and not piece.endswith("\ufffd"):
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        text += piece
    return text

  def _pending(self) -> str:
    previous = self._decode(self._ids[: self._num_emitted])
    text = self._decode(self._ids)
    if text.startswith(previous):
      return text[len(previous) :]
    # An invalid character has changed the previous piece.
    return self._decode(self._ids[self._num_emitted :])

  def finish(self) -> str:
    """Returns the text held back, with U+FFFD where incomplete, and resets."""
    piece = self._pending()
    self._ids, self._num_emitted = [], 0
    return piece


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> str | None:
  """Compares vocabularies; returns None if equal, else the difference.

  Drafter and target exchange ids, so ids must stand for the same tokens.
  """
  for index, (left, right) in enumerate(zip(a.tokens, b.tokens)):
    if left != right:
      return f"token {index} is {left!r} in one and {right!r} in the other"
  if a.vocab_size != b.vocab_size:
    longer = max(a.tokens, b.tokens, key=len)
    size = min(a.vocab_size, b.vocab_size)
    return (
      f"one has {a.vocab_size} tokens and the other {b.vocab_size}: token "
      f"{size}, {longer[size]!r}, is in one only"
    )
  return None


def check_vocabulary(
  target_size: int,
  draft_size: int,
  target: Tokenizer | None = None,
  draft: Tokenizer | None = None,
) -> None:
  """Raises ValueError if sizes differ, or the tokens of both tokenizers."""
  if target_size != draft_size:
    raise ValueError(
      f"the target has {target_size} token ids and the draft {draft_size}; "
      "they must share one vocabulary"
    )
  difference = target and draft and same_vocabulary(target, draft)
  if difference:
    raise ValueError(
      f"target and draft have different vocabularies: {difference}"
    )


def from_directory(
  directory: Path, limit: int | None = None
) -> Tokenizer | None:
  """Loads a directory's tokenizer; None if there is no tokenizer.json.

  The shipped models share one, in the folder above theirs.

  Raises ValueError for a damaged file or an end token not in the vocabulary.
  """
  path = directory / "tokenizer.json"
  if directory.absolute().parent == shipped.FOLDER:
    path = shipped.TOKENIZER
  if not path.is_file():
    return None
  try:
    inner = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises plain Exception
    raise ValueError(f"{path} is not a tokenizer: {error}") from error
  # The file may hold truncation and padding options of a training run.
  inner.no_truncation()
  inner.no_padding()
  eos_ids = []
  for token in huggingface.eos_tokens(directory):
    index = inner.token_to_id(token) if isinstance(token, str) else token
    if index is None:
      raise ValueError(
        f"{directory} ends texts with {token!r}, which is not in the vocabulary"
      )
    eos_ids.append(index)
  return Tokenizer(
    inner,
    special=huggingface.special_tokens(directory),
    eos_ids=eos_ids,
    chat_template=_chat_template(directory),
    limit=limit,
  )


def _chat_template(directory: Path) -> str | None:
  path = directory / "chat_template.jinja"
  if path.is_file():
    try:
      return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(f"{path} is not UTF-8 text: {error}") from error
  path = directory / "tokenizer_config.json"
  template = huggingface.read_json(path).get("chat_template")
  if isinstance(template, list):  # several named templates
    named = [entry for entry in template if isinstance(entry, dict)]
    template = next(
      (e.get("template") for e in named if e.get("name") == "default"), None
    )
  if template is not None and not isinstance(template, str):
    raise ValueError(
      f"{path} has chat_template = {template!r:.60}; it must be a string"
    )
  return template
