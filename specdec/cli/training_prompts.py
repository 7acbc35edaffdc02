"""Makes prompts for a target to answer (write_answers.py), from texts at hand.

  python scripts/training_prompts.py --questions=gsm8k_train.jsonl \\
    --passages=wikitext.txt --code=corpus/train --count=600 \\
    --output=prompts

Takes --count prompts of each source that is given, evenly spread over it: the
`question` of a JSONL file's lines; paragraphs of a text, with a request to sum
them up, to explain, to ask and answer, to translate or to list; beginnings of
Python functions, every other one with a request to complete it. The folder gets
prompts.jsonl and held_out.jsonl: prompt and category, a line each.
"""

from specdec.cli import app
from specdec.training import prompts
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("questions", None, "JSONL file whose lines have a question.")
  flags.string("passages", None, "Text with a paragraph a line.")
  flags.string("code", None, "Folder of Python files.")
  flags.integer("count", 600, "Prompts of each source.")
  flags.integer(
    "every", 20, "Every N-th prompt goes to held_out.jsonl; 0: none."
  )
  flags.string("output", None, "Folder of the results.")


def write_prompts(options: app.Options) -> None:
  """Reads every source that is given and writes the files."""
  app.check_at_least(options, 1, "count")
  app.check_at_least(options, 0, "every")
  folder = app.take_folder("--output", options.output)
  lines = []
  for name, read in prompts.SOURCES.items():
    path = getattr(options, name)
    if path:
      texts = prompts.spread(read(path), options.count)
      if not texts:
        raise ValueError(f"--{name}={path} has nothing to ask")
      lines += [{"prompt": text, "category": name} for text in texts]
  if not lines:
    raise ValueError("give --questions, --passages or --code")
  counts = prompts.write_parts(folder, lines, options.every)
  for path, count in counts.items():
    terminal.report(f"{count} prompts: {path}")


main = app.Program(__doc__, define, write_prompts)
