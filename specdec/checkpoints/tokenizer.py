"""Text to token ids and back, with chat templates and streaming.

Invariant: streamed pieces put together are the text that `decode` gives for
all ids at once, where that text is valid UTF-8.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from specdec.checkpoints import huggingface
from specdec.checkpoints.chat_template import ChatTemplate
from specdec.utils import files


class Tokenizer:
  """A `tokenizers.Tokenizer` and what a checkpoint says around it.

  Attributes:
    special: text of 'bos_token', 'eos_token' and others, where there are any.
    eos_ids: tokens that end a text.
    chat_template: Jinja source, or None.
    limit: rows of the model's embedding, or None; `encode` refuses ids past it.
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
    self._inner = inner
    self.special = dict(special or {})
    self.eos_ids = tuple(eos_ids)
    self.chat_template = chat_template
    self._template: ChatTemplate | None = None
    self.limit = limit

  @functools.cached_property
  def tokens(self) -> tuple[str | None, ...]:
    """String of every id as the vocabulary spells it; None for a hole."""
    vocabulary = self._inner.get_vocab(with_added_tokens=True)
    strings: list = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
      strings[index] = token
    return tuple(strings)

  @property
  def vocab_size(self) -> int:
    """One more than the highest id, added tokens included."""
    return len(self.tokens)

  @property
  def bos_id(self) -> int | None:
    """The token that begins a text, if there is one."""
    return self.token_id(self.special.get("bos_token"))

  def token_id(self, token: str | None) -> int | None:
    """Id of a token by its string, or None."""
    return None if token is None else self._inner.token_to_id(token)

  def encode(self, text: str, add_special: bool = True) -> list[int]:
    """Ids of a text; with `add_special` those that the model wants around it.

    Raises:
      ValueError: the text holds a token that the model has no embedding for,
        or half of a surrogate pair.
    """
    try:
      text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(
        f"the text holds {text[error.start]!a}, half of a surrogate pair, at "
        f"character {error.start}"
      ) from None
    ids = self._inner.encode(text, add_special_tokens=add_special).ids
    if self.limit is not None and max(ids, default=-1) >= self.limit:
      raise ValueError(
        f"token {self.tokens[max(ids)]!r} has id {max(ids)}; the model's "
        f"embedding has {self.limit} rows"
      )
    return ids

  def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
    """Text of ids; with `skip_special` without control tokens."""
    ids = [int(index) for index in ids]
    return self._inner.decode(ids, skip_special_tokens=skip_special)

  def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Ids of a conversation, up to where the assistant's answer begins.

    Args:
      messages: each {'role': ..., 'content': ...}.

    Raises:
      ValueError: there is no chat template, it refuses these messages, or it
        fails or takes too long.
    """
    # The template writes special tokens itself: none are added around it.
    return self.encode(self.chat_text(messages), add_special=False)

  def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
    """What `chat` encodes."""
    if self.chat_template is None:
      raise ValueError("this tokenizer has no chat template; use encode")
    if self._template is None or self._template.source != self.chat_template:
      self._template = ChatTemplate(self.chat_template)
    return self._template.render(messages, self.special)

  def save(self, directory: str | Path) -> None:
    """Writes the files that `from_directory` and transformers read."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    files.replace_file(directory / "tokenizer.json", self._inner.to_str())
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
    about["clean_up_tokenization_spaces"] = False
    options = {"tokenizer_config.json": about}
    if self.eos_ids:
      ids = list(self.eos_ids)
      options["generation_config.json"] = {"eos_token_id": ids}
    for name, content in options.items():
      text = json.dumps(content, indent=2) + "\n"
      files.replace_file(directory / name, text)
    if self.chat_template is not None:
      files.replace_file(directory / "chat_template.jinja", self.chat_template)


class TextStream:
  """Turns a growing list of ids into text that never breaks a character.

  A character can be spread over several tokens; until its last byte is there
  it decodes to U+FFFD, so text that ends with one is held back. Each step
  decodes a few tokens only, beginning with those of the last piece: some
  decoders treat the first token of a text differently.

  Byte-fallback decoders (SentencePiece) turn a whole run of byte tokens to
  U+FFFD when it holds one broken character; here only what was not yet given
  can follow them.
  """

  def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
    self._decode = functools.partial(
      tokenizer.decode, skip_special=skip_special
    )
    self._ids: list[int] = []  # of the last piece, and of what is held back
    self._given = 0  # how many of them make the last piece

  def push(self, ids: Iterable[int]) -> str:
    """The text that these further ids complete; often ''."""
    return "".join(self._push(int(index)) for index in ids)

  def _push(self, index: int) -> str:
    self._ids.append(index)
    piece = self._pending()
    if not piece or piece.endswith("\ufffd"):
      return ""
    self._ids = self._ids[self._given :]
    self._given = len(self._ids)
    return piece

  def _pending(self) -> str:
    before = self._decode(self._ids[: self._given])
    text = self._decode(self._ids)
    if text.startswith(before):
      return text[len(before) :]
    return self._decode(self._ids[self._given :])  # a byte run has broken

  def finish(self) -> str:
    """What was held back, broken characters as U+FFFD; then starts anew."""
    piece = self._pending()
    self._ids, self._given = [], 0
    return piece


def same_vocabulary(a: Tokenizer, b: Tokenizer) -> str | None:
  """None where ids mean the same strings in both, else what differs.

  Drafter and target exchange ids, so equal sizes are not enough.
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


def from_directory(
  directory: Path, limit: int | None = None
) -> Tokenizer | None:
  """The tokenizer of a Hugging Face directory, None without tokenizer.json.

  Raises:
    ValueError: one of its files is damaged, or an end token unknown.
  """
  path = directory / "tokenizer.json"
  if not path.is_file():
    return None
  try:
    inner = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises nothing more precise
    raise ValueError(f"{path} is not a tokenizer: {error}") from error
  # The file may carry the truncation and padding of someone's training run.
  inner.no_truncation()
  inner.no_padding()
  about = huggingface.read_json(directory / "tokenizer_config.json")
  special = huggingface.special_tokens(directory)
  eos_ids = []
  for token in huggingface.eos_tokens(directory):
    index = inner.token_to_id(token) if isinstance(token, str) else token
    if index is None:
      raise ValueError(
        f"{directory} ends texts with {token!r}, an unknown token"
      )
    eos_ids.append(index)
  return Tokenizer(
    inner,
    special=special,
    eos_ids=eos_ids,
    chat_template=_chat_template(directory, about),
    limit=limit,
  )


def _chat_template(directory: Path, about: Mapping) -> str | None:
  path = directory / "chat_template.jinja"
  if path.is_file():
    try:
      return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(f"{path} is not UTF-8 text: {error}") from error
  template = about.get("chat_template")
  if isinstance(template, list):  # several, by name
    named = [entry for entry in template if isinstance(entry, dict)]
    template = next(
      (e.get("template") for e in named if e.get("name") == "default"), None
    )
  if template is not None and not isinstance(template, str):
    raise ValueError(
      f"{directory / 'tokenizer_config.json'} has chat_template = "
      f"{template!r:.60}; it must be a text"
    )
  return template
