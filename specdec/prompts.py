"""Prompts from files: plain text, or one JSON object a line.

Invariant: every prompt says whether it is text, a user's message or token ids,
and a line that is none of them is named, not guessed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.checkpoints import Tokenizer

_ACCEPTED = "prompt, text, turns (its first is used) or token_ids"


class Prompt(NamedTuple):
  """One prompt; exactly one of the two is not None."""

  text: str | None = None
  token_ids: tuple[int, ...] | None = None


def read(path: str | Path) -> list[Prompt]:
  """All prompts of a file: a .jsonl file line by line, any other file whole.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it has no prompt, or a line that holds none.
  """
  path = Path(path).expanduser()
  if not path.is_file():
    raise FileNotFoundError(f"prompt file {path} does not exist")
  try:
    content = path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"prompt file {path} is not UTF-8 text: {error}") from None
  if path.suffix != ".jsonl":
    prompts = [Prompt(text=content)] if content else []
  else:
    prompts = [
      _parse(line, f"line {number} of {path}")
      for number, line in enumerate(content.split("\n"), 1)
      if line.strip()
    ]
  if not prompts:
    raise ValueError(f"prompt file {path} holds no prompt")
  return prompts


def _parse(line: str, where: str) -> Prompt:
  try:
    entry = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"{where} is not JSON ({error.msg})") from None
  if not isinstance(entry, dict):
    raise ValueError(f"{where} is not a JSON object; accepted: {_ACCEPTED}")
  ids = entry.get("token_ids")
  if ids is not None:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
      raise ValueError(f"{where}: token_ids must be a list of integers")
    return Prompt(token_ids=tuple(ids))
  turns = entry.get("turns")
  first = turns[0] if isinstance(turns, list) and turns else None
  for text in (entry.get("prompt"), entry.get("text"), first):
    if isinstance(text, str):
      return Prompt(text=text)
  raise ValueError(f"{where} has none of {_ACCEPTED}")


def encode(
  prompts: Sequence[Prompt], tokenizer: Tokenizer | None, chat: bool, size: int
) -> list[list[int]]:
  """Token ids of every prompt, `chat` wrapping texts in the chat template.

  Args:
    size: V of the model, which ready-made ids must stay under.

  Raises:
    ValueError: an empty prompt, an id out of range, or text without a
      tokenizer or, with chat, without a template.
  """
  encoded = []
  for number, prompt in enumerate(prompts):
    if prompt.token_ids is not None:
      ids = list(prompt.token_ids)
    elif tokenizer is None:
      raise ValueError("this model has no tokenizer; give token_ids instead")
    elif not prompt.text:
      raise ValueError(f"prompt {number} is empty; give at least one character")
    elif chat:
      ids = tokenizer.chat([{"role": "user", "content": prompt.text}])
    else:
      ids = tokenizer.encode(prompt.text)
    if not ids:
      raise ValueError(f"prompt {number} has no token; give at least one")
    bad = [i for i in ids if not 0 <= i < size]
    if bad:
      raise ValueError(
        f"prompt {number} holds token {bad[0]}; accepted: 0 to {size - 1}"
      )
    encoded.append(ids)
  return encoded
