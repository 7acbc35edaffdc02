"""Copies this interpreter's standard library as a corpus of Python.

  python scripts/stdlib_corpus.py --output=corpus

Writes corpus/train, corpus/held_out (modules that no model of this repository
was trained on), corpus/prompts.jsonl (beginnings of held-out functions) and
corpus/manifest.json: the interpreter's version and the SHA-256 of every file.
Leaves out tests, generated tables and files that are not UTF-8. Takes seconds;
the shipped models were trained on CPython 3.11.7.
"""

from pathlib import Path

from specdec.cli import app
from specdec.training import corpus
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("output", "corpus", "Folder to write; replaced.")


def write_corpus(options: app.Options) -> None:
  """Writes the corpus and prints its size."""
  app.check_folder("--output", options.output)
  sizes = corpus.write_stdlib(Path(options.output))
  for part in ("train", "held_out"):
    size = sum(sizes[part]) / 1e6
    terminal.report(f"{part}: {len(sizes[part])} files, {size:.2f} MB")
  terminal.report(f"prompts: {len(sizes['prompts'])}")


main = app.Program(__doc__, define, write_corpus)
