"""Prompts from files: plain text, JSON objects a line, or rows of Parquet.

Invariant: every prompt says whether it is text, a user's message or token ids,
and a line that is none of them is named, not guessed.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.checkpoints import Tokenizer
from specdec.utils import terminal

# Spec-Bench counts MT-bench's categories as one (arXiv:2401.07851).
_MT_BENCH = (
  "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem",
  "humanities",
)  # fmt: skip
_ACCEPTED = "prompt, text, turns (its first is used) or token_ids"
# In the place of most of SPEED-Bench's questions (arXiv:2604.09557).
_PLACEHOLDER = (
  "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
)
_PREPARE = (
  "examples/specdec_bench/prepare_data.py of github.com/NVIDIA/Model-Optimizer"
)
_SPEC_BENCH = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
_SPEED_BENCH = (
  f"huggingface.co/datasets/nvidia/SPEED-Bench, whose questions {_PREPARE} "
  "completes"
)
_THROUGHPUT = re.compile(r"throughput_(\d+k)")  # SPEED-Bench's, by length
SOURCES = {  # of prompts, by a part of a file's name or its folder's
  "spec_bench": _SPEC_BENCH,
  "question": _SPEC_BENCH,
  "humaneval": "data/HumanEval.jsonl.gz of github.com/openai/human-eval",
  "speed": _SPEED_BENCH,
  "qualitative": _SPEED_BENCH,
  "throughput": _SPEED_BENCH,
}


class Prompt(NamedTuple):
  """One prompt; exactly one of the first two is not None."""

  text: str | None = None
  token_ids: tuple[int, ...] | None = None
  category: str = ""  # what its line said, or the file's name
  name: str = ""  # where it stands: the file's name and its line's number


def _report_skipped(lines: Sequence[str]) -> None:
  for line in lines:
    terminal.report(f"skipped: {line}", file=sys.stderr)


def read(path: str | Path) -> list[Prompt]:
  """As `scan`; lines that hold no prompt are named on standard error."""
  prompts, broken = scan(path)
  _report_skipped(broken)
  return prompts


def scan(path: str | Path) -> tuple[list[Prompt], list[str]]:
  """Reads all prompts of a file, and a sentence for every line without one.

  A .jsonl file is read line by line, a .parquet file row by row, a file of text
  whole.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: no line holds a prompt, or it is not text.
  """
  path = Path(path).expanduser()
  if not path.is_file():
    name = _with_folder(path).lower().replace("-", "_")
    places = (place for part, place in SOURCES.items() if part in name)
    hint = next((f"; it may be {place}" for place in places), "")
    raise FileNotFoundError(f"prompt file {path} does not exist{hint}")
  prompts, broken = [], []
  if path.suffix == ".parquet":
    for number, entry in enumerate(_rows(path), 1):
      try:
        prompts.append(_prompt(entry, path, number))
      except ValueError as error:
        broken.append(f"row {number} of {path}{error}")
  elif path.suffix in (".json", ".csv"):
    raise ValueError(
      f"prompt file {path}: give .jsonl, a prompt a line, .parquet, or text"
    )
  elif path.suffix != ".jsonl":
    try:
      content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(
        f"prompt file {path} is not UTF-8 text: {error}"
      ) from None
    prompts = [Prompt(content, None, path.stem, path.name)] if content else []
  else:
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
      try:
        if line.strip():
          prompts.append(_prompt(_parse(line), path, number))
      except ValueError as error:
        broken.append(f"line {number} of {path}{error}")
  if not prompts:
    because = f": {broken[0]}" if broken else ""
    raise ValueError(f"prompt file {path} holds no prompt{because}")
  return prompts, broken


def _with_folder(path: Path) -> str:
  """Returns a file's name after its folder's, which may say what it is."""
  return "/".join(path.parts[-2:])


def _rows(path: Path) -> Iterator[dict]:
  """Yields the rows of a Parquet file."""
  try:
    from pyarrow import ArrowException, parquet
  except ImportError:
    raise ValueError(
      f"prompt file {path} is Parquet: pip install pyarrow, which reads it"
    ) from None
  try:
    with parquet.ParquetFile(path) as file:
      for batch in file.iter_batches():
        yield from batch.to_pylist()
  except (ArrowException, OSError) as error:
    raise ValueError(f"prompt file {path} cannot be read: {error}") from None


def _parse(line: bytes) -> dict:
  """Raises ValueError with the end of a sentence that begins with the line."""
  try:
    entry = json.loads(line.decode("utf-8"))
  except UnicodeDecodeError as error:
    raise ValueError(f" is not UTF-8 text ({error.reason})") from None
  except json.JSONDecodeError as error:
    raise ValueError(f" is not JSON ({error.msg})") from None
  except (ValueError, RecursionError) as error:  # too long a number, too deep
    raise ValueError(f" is no JSON that can be read ({error})") from None
  if not isinstance(entry, dict):
    raise ValueError(f" is not a JSON object; accepted: {_ACCEPTED}")
  return entry


def _prompt(entry: dict, path: Path, number: int) -> Prompt:
  """Raises ValueError as `_parse` does."""
  category = str(entry.get("category") or path.stem)
  spec_bench = {"question_id", "turns"} <= {*entry} and "src_id" not in entry
  if category in _MT_BENCH and spec_bench:  # SPEED-Bench has such names, too
    category = "mt_bench"
  name = f"{path.name}:{number}"
  if split := _THROUGHPUT.search(_with_folder(path)):
    category, name = f"{split[1]}, {category}", f"{split[0]}/{name}"
  ids = entry.get("token_ids")
  if ids is not None:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
      raise ValueError(": token_ids must be a list of integers")
    return Prompt(None, tuple(ids), category, name)
  turns = entry.get("turns")
  first = turns[0] if isinstance(turns, list) and turns else None
  for text in (entry.get("prompt"), entry.get("text"), first):
    if isinstance(text, str):
      if _PLACEHOLDER in text:
        raise ValueError(
          f" holds SPEED-Bench's placeholder; {_PREPARE} writes its question"
        )
      if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(" holds half of a surrogate pair")
      return Prompt(text, None, category, name)
  raise ValueError(f" has none of {_ACCEPTED}")


def encode(
  prompts: Sequence[Prompt], tokenizer: Tokenizer | None, chat: bool, size: int
) -> list[list[int]]:
  """Token ids of every prompt, `chat` wrapping texts in the chat template;
  refuses empty prompts, ids that are not below `size`, and texts where there
  is no tokenizer."""
  encoded = []
  for number, prompt in enumerate(prompts, 1):
    where = prompt.name or f"prompt {number}"
    if prompt.token_ids is not None:
      ids = list(prompt.token_ids)
    elif tokenizer is None:
      raise ValueError(
        "this model has no tokenizer; give a prompt file with token_ids"
      )
    elif not prompt.text:
      raise ValueError(f"{where} is empty; give at least one character")
    elif chat:
      ids = tokenizer.chat([{"role": "user", "content": prompt.text}])
    else:
      ids = tokenizer.encode(prompt.text)
    if not ids:
      raise ValueError(f"{where} has no token; give at least one")
    bad = [i for i in ids if not 0 <= i < size]
    if bad:
      raise ValueError(
        f"{where} holds token {bad[0]}; accepted: 0 to {size - 1}"
      )
    encoded.append(ids)
  return encoded


class Corpus(NamedTuple):
  """Encoded prompts of files, and what was left out."""

  prompts: list[Prompt]
  encoded: list[list[int]]
  groups: list[str]  # the category that each is counted under
  broken: list[str]  # a sentence for each line that holds no prompt
  too_long: int


def read_corpus(
  paths: Sequence[str],
  tokenizer: Tokenizer | None,
  chat: bool,
  size: int,
  limit: int = 0,
  max_tokens: int = 0,
) -> Corpus:
  """Reads and encodes files of prompts; lines without one are named.

  Args:
    chat, size: as `encode` takes them.
    limit: prompts of each category at most; 0 for all.
    max_tokens: of a prompt; longer ones are left out; 0 for none of them.
  """
  wanted, encoded, groups, broken, short = [], [], [], [], []
  for path in paths:
    prompts, skipped = scan(path)
    broken += skipped
    for prompt in prompts:
      try:
        [ids] = encode([prompt], tokenizer, chat, size)
      except ValueError as error:
        broken.append(str(error))
        continue
      short.append(not max_tokens or len(ids) <= max_tokens)
      # "all" is taken: the sum of all groups.
      everything = prompt.category == "all"
      group = "all (category)" if everything else prompt.category
      if short[-1] and not 0 < limit <= groups.count(group):
        wanted.append(prompt)
        encoded.append(ids)
        groups.append(group)
  _report_skipped(broken)
  if not short:
    raise ValueError("no prompt is left")
  if not encoded:
    raise ValueError(f"no prompt has --max_prompt_tokens={max_tokens} or fewer")
  return Corpus(wanted, encoded, groups, broken, short.count(False))
