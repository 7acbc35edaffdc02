"""Builds tokenizers from the metadata of GGUF files.

Invariant: text encodes as in llama.cpp; kinds of tokenizer that were not
compared with llama.cpp are rejected by name.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import (
  AddedToken,
  Regex,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

from specdec.checkpoints.gguf import Weights
from specdec.checkpoints.tokenizer import Tokenizer
from specdec.utils.spelling import check_choice

_KEY = "tokenizer.ggml."
# Values of token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Special tokens of a Tokenizer -> keys of the metadata.
_SPECIAL = {
  "bos_token": "bos_token_id",
  "eos_token": "eos_token_id",
  "unk_token": "unknown_token_id",
  "pad_token": "padding_token_id",
}
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
  """Returns a splitter into words, numbers as in `digits`, and the rest."""
  pattern = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  )
  split = pre_tokenizers.Split(pattern, "isolated")
  bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return pre_tokenizers.Sequence([split, bytes_])


class _ByteLevel(NamedTuple):
  """How one value of tokenizer.ggml.pre splits text before merging."""

  split: pre_tokenizers.PreTokenizer
  add_bos: bool = False  # default if the file has no add_bos_token
  ignore_merges: bool = False  # a word in the vocabulary is always one token


_LLAMA3 = _ByteLevel(_words(r"\p{N}{1,3}"), add_bos=True, ignore_merges=True)
PRE_TOKENIZERS = {
  "smollm": _ByteLevel(
    pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), _BYTES]
    )
  ),
  "gpt-2": _ByteLevel(_BYTES),
  "llama-bpe": _LLAMA3,
  "llama3": _LLAMA3,
  # Of SmolLM3 and of OLMo 2, which split words as Llama 3 does.
  "smaug-bpe": _ByteLevel(_words(r"\p{N}{1,3}")),
  "dbrx": _ByteLevel(_words(r"\p{N}{1,3}")),
  "qwen2": _ByteLevel(_words(r"\p{N}")),
}


def from_gguf(weights: Weights, limit: int | None = None) -> Tokenizer | None:
  """Builds the tokenizer of a file, or returns None if it has none.

  Raises ValueError for kinds that are not implemented, and what is incomplete.
  """
  kind = weights.get(_KEY + "model")
  if kind is None:
    return None
  builders = {"gpt2": _byte_level, "llama": _sentence_piece}
  what = f"{weights.source} has a tokenizer of model"
  check_choice(what, kind, builders, "; accepted")
  tokens = _list(weights, "tokens", str) or []
  kinds = _list(weights, "token_type", int) or [_NORMAL] * len(tokens)
  if tokens and len(kinds) != len(tokens):
    raise ValueError(
      f"{weights.source} has {len(tokens)} tokens and {len(kinds)} token types"
    )
  # Converters pad the vocabulary to the embedding with unused [PAD] tokens.
  size = len(tokens)
  while size and kinds[size - 1] == _UNUSED and tokens[size - 1][:4] == "[PAD":
    size -= 1
  tokens, kinds = tokens[:size], kinds[:size]
  if not tokens:
    raise ValueError(f"{weights.source} has a tokenizer without tokens")
  inner, add_bos = builders[kind](weights, tokens, kinds)
  inner.add_tokens(  # matched in text before splitting
    [
      AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
      for token, kind in zip(tokens, kinds)
      if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
  )
  special = {
    name: tokens[index]
    for name, key in _SPECIAL.items()
    if (index := _index(weights, key, size)) is not None
  }
  # A template reads ':' as a type id, so it names tokens without one.
  around = {
    name: special[f"{name}_token"]
    for name, default in (("bos", add_bos), ("eos", False))
    if f"{name}_token" in special
    and weights.get(f"{_KEY}add_{name}_token", default)
  }
  if around:
    inner.post_processor = processors.TemplateProcessing(
      single=[x for x in ("bos", "$A", "eos") if x == "$A" or x in around],
      special_tokens=[
        {"id": name, "ids": [inner.token_to_id(token)], "tokens": [token]}
        for name, token in around.items()
      ],
    )
  end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
  eos_ids = [_index(weights, key, size) for key in end_keys]
  template = weights.get("tokenizer.chat_template")
  if not isinstance(template, str | None):
    raise ValueError(
      f"{weights.source} has a tokenizer.chat_template that is not a string"
    )
  return Tokenizer(
    inner,
    special=special,
    eos_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
    chat_template=template,
    limit=limit,
  )


def _list(weights: Weights, key: str, kind: type) -> list | None:
  """Returns an array of the metadata, or None if it is absent."""
  values = weights.get(_KEY + key)
  if values is not None and not (
    isinstance(values, list) and all(isinstance(x, kind) for x in values)
  ):
    raise ValueError(
      f"{weights.source} has a {_KEY}{key} that is not a list of "
      f"{kind.__name__}"
    )
  return values


def _index(weights: Weights, key: str, size: int) -> int | None:
  index = weights.get(_KEY + key)
  if index is not None and (type(index) is not int or not 0 <= index < size):
    raise ValueError(
      f"{weights.source} has {_KEY}{key} = {index!r:.60}; it must be an "
      f"integer below {size}"
    )
  return index


def _byte_level(
  weights: Weights, tokens: Sequence[str], _: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
  """Builds a byte-level BPE; returns it and its default for add_bos."""
  pre = weights.get(_KEY + "pre", "default")
  what = f"{weights.source} has tokenizer.ggml.pre ="
  check_choice(what, pre, PRE_TOKENIZERS, "; accepted")
  merges = _list(weights, "merges", str)
  if merges is None:
    raise ValueError(f"{weights.source} has a gpt2 tokenizer without merges")
  options = PRE_TOKENIZERS[pre]
  inner = _bpe(
    weights,
    tokens,
    # Neither half is empty, and the first may begin with the separator.
    [
      (merge[: (space := merge.find(" ", 1))], merge[space + 1 :])
      for merge in merges
    ],
    ignore_merges=options.ignore_merges,
  )
  inner.pre_tokenizer = options.split
  inner.decoder = decoders.ByteLevel()
  return inner, options.add_bos


def _sentence_piece(
  weights: Weights, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
  """Builds a SentencePiece BPE; returns it and its default for add_bos.

  Merges follow from the scores of the tokens.
  """
  scores = _list(weights, "scores", float)
  if scores is None:
    raise ValueError(f"{weights.source} has a llama tokenizer without scores")
  score = {
    token: value
    for token, value, kind in zip(tokens, scores, kinds)
    if kind not in (_UNKNOWN, _CONTROL, _BYTE)
  }
  merges = [
    (token[:i], token[i:])
    for token in score
    for i in range(1, len(token))
    if token[:i] in score and token[i:] in score
  ]
  merges.sort(key=lambda merge: -score["".join(merge)])
  unknown = _index(weights, "unknown_token_id", len(tokens))
  inner = _bpe(
    weights,
    tokens,
    merges,
    byte_fallback=_BYTE in kinds,
    fuse_unk=True,
    unk_token=None if unknown is None else tokens[unknown],
  )
  normalize = [normalizers.Replace(" ", "\u2581")]
  decode = [
    decoders.Replace("\u2581", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if weights.get(_KEY + "add_space_prefix", True):
    normalize.insert(0, normalizers.Prepend("\u2581"))
    decode.append(decoders.Strip(" ", 1, 0))
  inner.normalizer = normalizers.Sequence(normalize)
  inner.decoder = decoders.Sequence(decode)
  return inner, True


def _bpe(
  weights: Weights,
  tokens: Sequence[str],
  merges: list[tuple[str, str]],
  **options: Any,
) -> tokenizers.Tokenizer:
  vocabulary = {token: index for index, token in enumerate(tokens)}
  try:
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))
  except Exception as error:  # the library raises plain Exception
    raise ValueError(
      f"the tokenizer in {weights.source} is inconsistent: {error}"
    ) from error
