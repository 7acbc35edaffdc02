"""Pairs for an encoder-decoder, from Python functions.

Two tasks, named by the beginning of the source as T5's are: 'docstring: ' and a
function without its docstring, whose docstring is the text; 'body: ' and a
signature with its docstring, whose body is the text.
"""

import ast
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.training.prompts import lines_of, modules, spread
from specdec.utils import files

_PROMPT = 400  # most characters of a source that is a prompt
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Pair(NamedTuple):
  """One example of a task."""

  category: str  # 'docstring' or 'body'
  source: str
  text: str


def pairs(path: str | Path) -> list[Pair]:
  """Returns both tasks' pairs of all functions, methods too, in files' order.

  Functions without a docstring serve the task 'body' alone, and those that are
  nothing but a docstring neither.

  Raises:
    FileNotFoundError, ValueError: as data.read_texts.
  """
  result = []
  for text, module in modules(path):
    lines = lines_of(text)
    for node in ast.walk(module):
      if isinstance(node, _FUNCTION):
        result += _of_function(node, lines)
  return result


def _of_function(node: _FUNCTION, lines: Sequence[str]) -> Iterator[Pair]:
  docstring = ast.get_docstring(node)
  body = node.body[1:] if docstring else node.body
  first = node.body[0]
  before = lines[first.lineno - 1].encode()[: first.col_offset]
  # `def f(): return 0` has no head that ends with a line.
  if not body or before.strip():
    return
  decorators = getattr(first, "decorator_list", [])
  start = min(x.lineno for x in (first, *decorators)) - 1
  head = lines[node.lineno - 1 : start]
  described = lines[start : first.end_lineno] if docstring else []
  rest = lines[start + len(described) : node.end_lineno]
  if docstring:
    source = textwrap.dedent("".join([*head, *rest]))
    yield Pair("docstring", f"docstring: {source}", docstring)
  first = lines[node.lineno - 1]
  indent = first[: len(first) - len(first.lstrip())]
  source = textwrap.dedent("".join([*head, *described]))
  # What lies left of it is within a string, and stays.
  rest = (x.removeprefix(indent) if x.strip() else "\n" for x in rest)
  text = "".join(rest)
  yield Pair("body", f"body: {source}", text.strip("\n"))


def write(
  corpus: Path, folder: Path, prompts: int
) -> dict[str, tuple[int, int]]:
  """Writes the pairs of a corpus (training/corpus.py) to a folder.

  train.jsonl and held_out.jsonl have a source and a text a line;
  docstring.jsonl and body.jsonl have held-out sources as prompts.

  Args:
    folder: exists already.
    prompts: of each task, evenly spaced among the short ones.

  Returns:
    How many pairs of each task train and held_out have.

  Raises:
    FileNotFoundError, ValueError: the corpus is none, or has no function.
  """
  counts = {}
  for part in ("train", "held_out"):
    members = pairs(corpus / part)
    by_task = {
      task: [pair for pair in members if pair.category == task]
      for task in ("docstring", "body")
    }
    if not all(by_task.values()):
      raise ValueError(f"{corpus / part} has no function with a docstring")
    counts[part] = tuple(len(x) for x in by_task.values())
    rows = [{"source": pair.source, "text": pair.text} for pair in members]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    files.replace_text(folder / f"{part}.jsonl", lines)
  for task, members in by_task.items():
    short = [pair.source for pair in members if len(pair.source) <= _PROMPT]
    lines = "".join(
      json.dumps({"prompt": source, "category": task}) + "\n"
      for source in spread(short, prompts)
    )
    files.replace_text(folder / f"{task}.jsonl", lines)
  return counts
