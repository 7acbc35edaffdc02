"""Prepares training data: a corpus, a tokenizer, prompts for a target.

  python scripts/prepare_data.py --make=python --output=corpus \\
    --packages=jax,numpy,scipy --held_out_packages=chex
  python scripts/prepare_data.py --make=tokenizer --data=corpus/train \\
    --output=tokenizer
  python scripts/prepare_data.py --make=pairs --data=corpus --output=pairs
  python scripts/prepare_data.py --make=prompts \\
    --questions=gsm8k_train.jsonl --passages=wikitext.txt \\
    --code=corpus/train --count=600 --output=prompts

python copies this interpreter's standard library, and the installed packages
that are named, if their metadata state a licence of BSD, MIT, Apache, PSF or
ISC: train/, held_out/ (modules that no model of this repository was trained on,
and whole packages), prompts.jsonl (beginnings of the standard library's
held-out functions) and manifest.json, versions, licences and the SHA-256 of
every file. Leaves out tests, tables, what packages brought along from
elsewhere, and files that are not UTF-8. The folder is replaced.

tokenizer trains a byte-level BPE tokenizer on a folder of text or a JSONL file,
which this repository and transformers read. Any text can be encoded: bytes are
the alphabet. Id 0 is the token that ends a document.

pairs reads the functions of such a corpus for an encoder-decoder: a docstring
from the function without it, and a body from the signature and its docstring.
The folder gets train.jsonl and held_out.jsonl, a source and a text a line, and
docstring.jsonl and body.jsonl, 32 held-out sources each as prompts.

prompts takes --count prompts of each source that is given, evenly spread over
it: the `question` of a JSONL file's lines; paragraphs of a text, with a request
to sum them up, to explain, to ask and answer, to translate or to list;
beginnings of Python functions, every other one with a request to complete it;
and a few lines from all over the files of a folder, for a target that goes on
with any text (--beginnings).
The folder gets prompts.jsonl and held_out.jsonl: prompt and category, a line
each, for a target to answer (write_text.py).
"""

from pathlib import Path

from specdec.cli import app, setup_flags
from specdec.training import bpe, corpus, data, functions, prompts
from specdec.utils import remote, terminal

PROMPTS = 32  # of each task of --make=pairs
FLAGS = {
  "python": ("packages", "held_out_packages"),
  "tokenizer": ("data", "vocab_size"),
  "pairs": ("data",),
  "prompts": (*prompts.SOURCES, "count", "every"),
}


def define(flags: app.Flags) -> None:
  flags.enum("make", None, list(FLAGS), "What to make.")
  flags.string("output", None, "Folder to write; default corpus, or tokenizer.")
  flags.string("data", None, "Text to train a tokenizer on, or a corpus.")
  flags.integer("vocab_size", 4096, "Tokens, bytes included.")
  flags.list("packages", [], "Installed packages for the corpus.")
  flags.list("held_out_packages", [], "Installed packages to hold out of it.")
  flags.string("questions", None, "JSONL file whose lines have a question.")
  flags.string("passages", None, "Text with a paragraph a line.")
  flags.string("code", None, "Folder of Python files.")
  flags.string("beginnings", None, "Folder of files to begin from anywhere.")
  flags.integer("count", 600, "Prompts of each source.")
  flags.integer(
    "every", 20, "Every N-th prompt goes to held_out.jsonl; 0: none."
  )


def make_python(options: app.Options) -> None:
  output = options.output or "corpus"
  app.check_folder("--output", output)
  sizes = corpus.write(
    Path(output), options.packages, options.held_out_packages
  )
  for part in ("train", "held_out"):
    size = sum(sizes[part]) / 1e6
    terminal.report(f"{part}: {len(sizes[part])} files, {size:.2f} MB")
  terminal.report(f"prompts: {len(sizes['prompts'])}")


def make_tokenizer(options: app.Options) -> None:
  if not options.data:
    raise ValueError("give --data, a folder or a file of text")
  output = options.output or "tokenizer"
  app.check_at_least(options, bpe.MIN_SIZE, "vocab_size")
  app.check_folder("--output", output)
  texts = data.read_texts(options.data)
  tokenizer = bpe.train(texts, options.vocab_size)
  bpe.save(tokenizer, Path(output))
  sample = texts[: 1 + len(texts) // 20]
  terminal.report(
    f"{tokenizer.get_vocab_size()} tokens; "
    f"{bpe.bytes_per_token(tokenizer, sample):.2f} bytes a token on "
    f"{len(sample)} of its documents"
  )


def make_pairs(options: app.Options) -> None:
  if not options.data:
    raise ValueError("give --data, a folder that --make=python wrote")
  folder = app.take_folder("--output", options.output)
  counts = functions.write(Path(options.data), folder, PROMPTS)
  for part, (docstrings, bodies) in counts.items():
    terminal.report(f"{part}: {docstrings} docstrings, {bodies} bodies")


def make_prompts(options: app.Options) -> None:
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
    raise ValueError("give --questions, --passages, --code or --beginnings")
  for path, count in prompts.write_parts(folder, lines, options.every):
    terminal.report(f"{count} prompts: {path}")


def prepare(options: app.Options) -> None:
  if options.make is None:
    raise ValueError(f"give --make, one of {', '.join(FLAGS)}")
  remote.check_local("--output", options.output or "")
  setup_flags.refuse_others(options, "make", FLAGS)
  make = {
    "python": make_python,
    "tokenizer": make_tokenizer,
    "pairs": make_pairs,
    "prompts": make_prompts,
  }
  make[options.make](options)


main = app.Program(__doc__, define, prepare)
