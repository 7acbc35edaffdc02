"""Prompts for a target to answer (write_answers.py), from texts at hand.

  python scripts/training_prompts.py --questions=gsm8k_train.jsonl \\
    --passages=wikitext.txt --code=corpus/train --count=600 \\
    --output=prompts

Takes --count prompts of each source that is given, evenly spread over it: the
`question` of a JSONL file's lines; paragraphs of a text, with a request to sum
them up, to explain, to ask and answer, to translate or to list; beginnings of
Python functions, every other one with a request to complete it. The folder gets
prompts.jsonl and held_out.jsonl: prompt and category, a line each.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import _main
import _output
import _prompt_parts
from absl import flags

from specdec.training import data

flags.DEFINE_string(
  "questions", None, "JSONL file whose lines have a question."
)
flags.DEFINE_string("passages", None, "Text with a paragraph a line.")
flags.DEFINE_string("code", None, "Folder of Python files.")
flags.DEFINE_integer("count", 600, "Prompts of each source.")
FLAGS = flags.FLAGS
for _module in (_output, _prompt_parts):
  flags.adopt_module_key_flags(_module)
FLAG_NAMES = ["questions", "passages", "code", "count", "every", "output"]

REQUESTS = (
  "Summarize the following text:\n\n{}",
  "{}\n\nWhat is this text about? Explain it in your own words.",
  "Write three questions about the following text and answer them:\n\n{}",
  "Translate the following text into German:\n\n{}",
  "{}\n\nAnswer by this text alone: who or what is it about, and when?",
  "Give the following text a title, and name what it says in a list:\n\n{}",
)
_SHORT, _LONG = 300, 1500  # characters of a passage; of a function's head
_BODY = 3  # lines that a function must have behind its first


def questions(path: str) -> list[str]:
  """The questions of a JSONL file."""
  lines = Path(path).read_text(encoding="utf-8").splitlines()
  found = []
  for number, line in enumerate(lines, 1):
    if line.strip():
      try:
        found.append(json.loads(line)["question"])
      except (KeyError, TypeError, ValueError):
        raise ValueError(f"line {number} of {path} has no question") from None
  return found


def passages(path: str) -> list[str]:
  """Paragraphs with requests, one after the other."""
  lines = Path(path).read_text(encoding="utf-8").splitlines()
  found = [x.strip() for x in lines if _SHORT <= len(x.strip()) <= _LONG]
  return [REQUESTS[i % len(REQUESTS)].format(x) for i, x in enumerate(found)]


def functions(path: str) -> list[str]:
  """Heads of functions, with a request and without, one after the other."""
  asked = "Complete this Python function:\n\n{}"
  heads = enumerate(heads_of_functions(path))
  return [head if i % 2 else asked.format(head) for i, head in heads]


def heads_of_functions(path: str) -> Iterator[str]:
  """Up to the docstring's end, of all Python files of a folder."""
  for document in data.read(path):
    try:
      module = ast.parse(document.text)
    except SyntaxError:
      continue
    lines = document.text.splitlines()
    for node in module.body:
      if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
        continue
      if len(node.body) > 1 and node.end_lineno - node.lineno > _BODY:
        head = "\n".join(lines[node.lineno - 1 : node.body[1].lineno - 1])
        if len(head) <= _LONG:
          yield head


def spread(found: Sequence[str], count: int) -> list[str]:
  """At most so many, evenly spread."""
  step = max(1.0, len(found) / count)
  return [found[int(i * step)] for i in range(min(count, len(found)))]


def run() -> None:
  """Reads every source that is given and writes the file."""
  if not FLAGS.output:
    raise ValueError("give --output, a folder")
  if FLAGS.count < 1:
    raise ValueError(f"--count={FLAGS.count}; it must be >= 1")
  _prompt_parts.check_flags()
  sources = {
    "questions": (FLAGS.questions, questions),
    "passages": (FLAGS.passages, passages),
    "code": (FLAGS.code, functions),
  }
  lines = []
  for name, (path, read) in sources.items():
    if path:
      found = read(path)
      if not found:
        raise ValueError(f"--{name}={path} has nothing to ask")
      lines += [
        {"prompt": text, "category": name}
        for text in spread(found, FLAGS.count)
      ]
  if not lines:
    raise ValueError("give --questions, --passages or --code")
  _prompt_parts.write(Path(FLAGS.output), lines)


main = _main.main_of("training_prompts", run)

if __name__ == "__main__":
  _main.start(main)
