"""Prompts for a target to answer, from texts at hand.

Its answers train a drafter: drafts follow the target's text, not people's.
"""

import ast
import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.training import data
from specdec.utils import files

REQUESTS = (
  "Summarize the following text:\n\n{}",
  "{}\n\nWhat is this text about? Explain it in your own words.",
  "Write three questions about the following text and answer them:\n\n{}",
  "Translate the following text into German:\n\n{}",
  "{}\n\nAnswer by this text alone: who or what is it about, and when?",
  "Give the following text a title, and name what it says in a list:\n\n{}",
)
_COMPLETE = "Complete this Python function:\n\n{}"
_SHORT, _LONG = 300, 1500  # characters of a passage; of a function's head
_HEAD, _APART = 160, 1200  # characters of a beginning, and between two
_BODY = 3  # lines that a function must have after its first


def questions(path: str | Path) -> list[str]:
  """Returns the `question` of every line of a JSONL file.

  Raises:
    ValueError: a line has none.
  """
  lines = Path(path).read_text(encoding="utf-8").split("\n")
  texts = []
  for number, line in enumerate(lines, 1):
    if line.strip():
      try:
        text = json.loads(line)["question"]
      except (KeyError, TypeError, ValueError):
        text = None
      if not text or not isinstance(text, str):
        raise ValueError(f"line {number} of {path} has no question")
      texts.append(text)
  return texts


def passages(path: str | Path) -> list[str]:
  """Returns the paragraphs of a text with a paragraph a line, with requests.

  Short and long ones are left out; REQUESTS take turns.
  """
  lines = Path(path).read_text(encoding="utf-8").split("\n")
  texts = [x.strip() for x in lines if _SHORT <= len(x.strip()) <= _LONG]
  return [REQUESTS[i % len(REQUESTS)].format(x) for i, x in enumerate(texts)]


def modules(path: str | Path) -> Iterator[tuple[str, ast.Module]]:
  """Yields every text of Python, and what it is parsed to."""
  for text in data.read_texts(path):
    with contextlib.suppress(SyntaxError):
      yield text, ast.parse(text)


def lines_of(text: str) -> list[str]:
  """Returns the lines that ast counts, which do not end at a form feed."""
  return list(io.StringIO(text, newline=""))


def functions(path: str | Path) -> list[str]:
  """Returns functions up to the end of their docstrings.

  Every other one comes with a request.
  """
  heads = []
  for text, module in modules(path):
    lines = lines_of(text)
    for node in module.body:
      if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
        continue
      if len(node.body) > 1 and node.end_lineno - node.lineno > _BODY:
        head = "".join(lines[node.lineno - 1 : node.body[0].end_lineno])
        head = head.removesuffix("\n")
        if len(head) <= _LONG:
          heads.append(head)
  return [
    head if i % 2 else _COMPLETE.format(head) for i, head in enumerate(heads)
  ]


def beginnings(path: str | Path) -> list[str]:
  """Returns lines of at most _HEAD characters from every _APART characters.

  They end within a line, as the text before a token does.
  """
  heads = []
  for text in data.read_texts(path):
    for start in range(0, len(text) - _HEAD, _APART):
      start = text.find("\n", start) + 1  # 0 where there is no line after it
      head = text[start : start + _HEAD].rstrip()
      if head:
        heads.append(head)
  return list(dict.fromkeys(heads))  # in a long line several begin alike


SOURCES = {
  "questions": questions,
  "passages": passages,
  "code": functions,
  "beginnings": beginnings,
}


def spread(texts: Sequence[str], count: int) -> list[str]:
  """Returns at most `count` texts, evenly spaced."""
  step = max(1.0, len(texts) / count)
  return [texts[int(i * step)] for i in range(min(count, len(texts)))]


def write_parts(
  folder: Path, lines: Sequence[dict], every: int
) -> list[tuple[Path, int]]:
  """Writes prompts.jsonl and held_out.jsonl, in the first process only.

  Args:
    folder: exists already.
    lines: one object a prompt.
    every: each `every`-th prompt goes to held_out.jsonl instead; 0: none.

  Returns:
    Each file and the number of its prompts.
  """
  parts = {"prompts": [], "held_out": []}
  for i, line in enumerate(lines, 1):
    part = "held_out" if every and i % every == 0 else "prompts"
    parts[part].append(json.dumps(line) + "\n")
  for name, part in parts.items():
    files.replace_text(folder / f"{name}.jsonl", "".join(part))
  return [(folder / f"{name}.jsonl", len(x)) for name, x in parts.items()]
