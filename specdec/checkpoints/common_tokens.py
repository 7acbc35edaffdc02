"""Which tokens two tokenizers share, and how one spells the other's.

For a draft model with another tokenizer (TLI, arXiv:2502.05202). Tokens are
compared as the bytes that they stand for: markers of spaces ('Ġ' of byte-level
BPE, '▁' of SentencePiece) and byte tokens (<0x0A>) are resolved. Invariant: a
token that both have is spelled with its own counterpart alone.
"""

import functools
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from specdec.checkpoints.tokenizer import Tokenizer
from specdec.drafters.token_map import TokenMap

LEAST = 0.05  # of the smaller vocabulary, that must be common
_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MODELS = ("BPE", "Unigram")  # that spell a string by itself


class CommonTokens(NamedTuple):
  """A map to a draft's tokens, and what can be said about it."""

  token_map: TokenMap  # NumPy arrays
  num_common: int
  sizes: tuple[int, int]  # ids of target and draft
  num_unspelled: int  # the target's tokens of which the draft reads nothing

  def __str__(self) -> str:
    count, (target, draft) = self.num_common, self.sizes
    pieces = len(self.token_map.pieces) / max(target - self.num_unspelled, 1)
    return (
      f"{count:,} common tokens, {count / target:.0%} of the target's "
      f"{target:,} and {count / draft:.0%} of the draft's {draft:,}; a token "
      f"of the target is {pieces:.1f} of the draft's, and "
      f"{self.num_unspelled:,} are none"
    )


def common_tokens(
  target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
) -> CommonTokens:
  """Compares two tokenizers, and spells every token of the target's.

  Special tokens go by their role: an end of text is the other's end of text, a
  beginning is left out, as the draft's texts begin with its own. Other special
  tokens are common if their strings are equal, and else spelled as text.

  Args:
    target_size, draft_size: rows of the models' embeddings; ids at or above
      them are left out, and ids that no tokenizer has are spelled with nothing.

  Raises:
    ValueError: a tokenizer is of a kind whose tokens are not known as bytes, or
      too few tokens are common.
  """
  ours = _vocabulary(target, target_size)
  theirs = _vocabulary(draft, draft_size)
  to_draft = np.full(target_size, -1, np.int32)
  for tokens, index in (
    (ours.plain, theirs.plain),
    (ours.special, theirs.special),
  ):
    for token, number in tokens.items():
      to_draft[number] = index.get(token, -1)
  if ours.end is not None and theirs.end is not None:
    to_draft[to_draft == theirs.end] = -1
    to_draft[ours.end] = theirs.end
  silent = ours.begin is not None and ours.begin != ours.end
  if silent:
    to_draft[ours.begin] = -1
  num_common = int((to_draft >= 0).sum())
  smaller = min(len(ours), len(theirs))
  if num_common < LEAST * smaller:
    raise ValueError(
      f"the tokenizers have {num_common:,} tokens in common, and at least "
      f"{LEAST:.0%} of the smaller one's {smaller:,} are needed"
    )
  spelled: list[Sequence[int]] = [()] * target_size
  for number, data in enumerate(ours.data):
    if to_draft[number] >= 0:
      spelled[number] = (int(to_draft[number]),)
    elif data and not (silent and number == ours.begin):
      spelled[number] = theirs.spell(data)
  start = np.cumsum([0, *map(len, spelled)], dtype=np.int32)
  pieces = np.array([x for one in spelled for x in one], np.int32)
  prefix = np.array(theirs.prefix, np.int32)
  return CommonTokens(
    TokenMap(to_draft, start, pieces, prefix, to_draft),
    num_common,
    (target_size, draft_size),
    sum(not one for one in spelled),
  )


class _Vocabulary:
  """A tokenizer's tokens as bytes.

  Attributes:
    data: bytes of every id, None where there is none.
    plain: id of the bytes of an ordinary token; a token of text comes before a
      byte token.
    special: id of a special token's string.
    begin, end: ids of the special tokens, None where there is none.
    prefix: ids that begin every text.
  """

  def __init__(self, tokenizer: Tokenizer, size: int):
    inner = tokenizer.inner
    self._model = inner.model
    self._is_bytes = _is_byte_level(inner)
    added = inner.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    self.data: list[bytes | None] = [None] * size
    self.plain: dict[bytes, int] = {}
    self.special: dict[str, int] = {}
    byte_tokens = []
    for number, token in enumerate(tokenizer.tokens[:size]):
      if not token:
        continue
      if number in special:
        self.special[token] = number
        self.data[number] = token.encode()
        continue
      data = self._bytes(token)
      self.data[number] = data
      if self._is_byte(token):
        byte_tokens.append((data, number))
      else:
        self.plain.setdefault(data, number)
    for data, number in byte_tokens:
      self.plain.setdefault(data, number)
    self._single = {data: i for data, i in self.plain.items() if len(data) == 1}
    self._single |= dict(byte_tokens)
    self.begin = self._role(tokenizer, "bos_token")
    self.end = self._role(tokenizer, "eos_token")
    if self.end is None and tokenizer.eos_ids:
      self.end = tokenizer.eos_ids[0]
    first = inner.encode("a")
    self.prefix = []
    for number, mask in zip(first.ids, first.special_tokens_mask):
      if not mask:
        break
      self.prefix.append(number)

  def __len__(self) -> int:
    return sum(data is not None for data in self.data)

  def _role(self, tokenizer: Tokenizer, name: str) -> int | None:
    return self.special.get(tokenizer.special.get(name, ""))

  def _is_byte(self, token: str) -> bool:
    return not self._is_bytes and _BYTE.fullmatch(token) is not None

  def _bytes(self, token: str) -> bytes:
    if self._is_byte(token):
      return bytes([int(_BYTE.fullmatch(token)[1], 16)])
    if not self._is_bytes:
      return token.replace(_SPACE, " ").encode()
    try:
      return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # not in letters that stand for bytes
      return token.encode()

  def _string(self, data: bytes) -> str:
    """What the model's own vocabulary writes for bytes; '' for broken text."""
    if self._is_bytes:
      return data.decode("latin-1").translate(_LETTERS)
    try:
      return data.decode().replace(" ", _SPACE)
    except UnicodeDecodeError:
      return ""

  def spell(self, data: bytes) -> tuple[int, ...]:
    """Returns ids whose bytes are `data`: as the model splits it, or byte by
    byte; () where it has no such bytes."""
    pieces = self._model.tokenize(self._string(data))
    pieces = [piece.id for piece in pieces]
    within = max(pieces, default=0) < len(self.data)
    if within and b"".join([self.data[i] or b"" for i in pieces]) == data:
      return tuple(pieces)
    single = [self._single.get(bytes([byte])) for byte in data]
    return () if None in single else tuple(single)


_vocabulary = functools.lru_cache(maxsize=4)(_Vocabulary)


def _is_byte_level(inner: tokenizers.Tokenizer) -> bool:
  """Whether letters of its tokens stand for bytes; else it is SentencePiece.

  Raises:
    ValueError: it is neither.
  """
  kind = type(inner.model).__name__
  state = inner.decoder.__getstate__() if inner.decoder is not None else "{}"
  decoder = json.loads(state)
  steps = decoder.get("decoders", [decoder])
  names = [step.get("type") for step in steps]
  if kind in _MODELS and "ByteLevel" in names:
    return True
  marked = any(
    step.get("type") == "Metaspace"
    or (step.get("type") == "Replace" and _SPACE in str(step.get("pattern")))
    for step in steps
  )
  if kind in _MODELS and marked:
    return False
  raise ValueError(
    f"a tokenizer of model {kind} and decoder {', '.join(map(str, names))}: "
    "its tokens are not known as bytes; those of byte-level BPE and of "
    "SentencePiece (BPE or Unigram) are"
  )


def _letters() -> dict[int, str]:
  """Returns the printable letter of each byte, as GPT-2 chose them.

  Bytes that are printable in Latin-1 are themselves, the others the letters
  from 256 on, in order.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = iter(range(256, 512))
  return {b: chr(b if b in printable else next(others)) for b in range(256)}


_LETTERS = _letters()
# Latin-1 letters that stand for no byte become one that Latin-1 lacks.
_BYTES = dict.fromkeys(range(256), "\uffff")
_BYTES |= {ord(letter): chr(byte) for byte, letter in _LETTERS.items()}
