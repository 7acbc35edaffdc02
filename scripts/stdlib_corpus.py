"""Copies this interpreter's standard library as a corpus of Python.

  python scripts/stdlib_corpus.py --output=corpus

Writes corpus/train, corpus/held_out (modules that no model of this repository
was trained on), corpus/prompts.jsonl (beginnings of held-out functions) and
corpus/manifest.json: the interpreter's version and the SHA-256 of every file.
Tests, generated tables and files that are no UTF-8 are left out. Takes seconds;
the shipped models were trained on CPython 3.11.7.
"""

import hashlib
import io
import json
import platform
import sysconfig
from pathlib import Path

import _main
from absl import flags

from specdec.utils import files, terminal

# Folders of tests, of tables and of other people's packages.
SKIPPED_FOLDERS = {
  "__phello__",
  "__pycache__",
  "encodings",
  "idle_test",
  "lib-dynload",
  "pydoc_data",
  "site-packages",
  "test",
  "tests",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "test_")
# Mostly tables, or written by a program.
SKIPPED_FILES = {
  "html/entities.py",
  "keyword.py",
  "locale.py",
  "stringprep.py",
  "token.py",
}
# Whole modules, of several kinds: data structures, parsers, numbers, text.
HELD_OUT = (
  "bisect.py",
  "calendar.py",
  "configparser.py",
  "csv.py",
  "fractions.py",
  "graphlib.py",
  "heapq.py",
  "json",
  "queue.py",
  "sched.py",
  "shlex.py",
  "statistics.py",
  "textwrap.py",
)

PROMPTS = 2  # of a held-out file
PROMPT_SIZE = 400  # characters: the shipped models know 256 positions

_OUTPUT = flags.DEFINE_string("output", "corpus", "Folder to write; replaced.")


def wanted(path: Path) -> bool:
  """Whether a module, by its path in the library, belongs to the corpus."""
  if path.as_posix() in SKIPPED_FILES:
    return False
  return not any(
    part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES)
    for part in path.parts
  )


def held_out(path: Path) -> bool:
  """Whether a module is kept from training."""
  return path.parts[0] in HELD_OUT


def prompts(text: str) -> list[str]:
  """Texts that end with the first line of a function.

  Without its line's end, which in most vocabularies is one token with the
  spaces that follow it.
  """
  lines = text.splitlines(keepends=True)
  ends = [i + 1 for i, line in enumerate(lines) if line.endswith("):\n")]
  texts = ["".join(lines[:end]) for end in ends if "def " in lines[end - 1]]
  texts = [text.rstrip("\n") for text in texts]
  long = [text[-PROMPT_SIZE:] for text in texts if len(text) >= PROMPT_SIZE]
  return long[:: -(-len(long) // PROMPTS)] if long else []


def write_corpus() -> None:
  """Writes the whole corpus."""
  library = Path(sysconfig.get_paths()["stdlib"])
  output = Path(_OUTPUT.value)
  _main.check_folder("--output", _OUTPUT.value)
  files.restore(output)
  present = {x.name for x in output.glob("*")} - {".lock"}
  if present and "manifest.json" not in present:
    raise ValueError(f"{output} exists and is no corpus; not replaced")
  files.lock(output)
  contents = {"train": {}, "held_out": {}}
  for path in sorted(library.rglob("*.py")):
    name = path.relative_to(library)
    content = path.read_bytes()
    if not wanted(name) or not content.strip():
      continue
    try:
      content.decode()
    except UnicodeDecodeError:
      continue
    part = "held_out" if held_out(name) else "train"
    contents[part][name.as_posix()] = content
  digests = {
    part: {name: hashlib.sha256(x).hexdigest() for name, x in texts.items()}
    for part, texts in contents.items()
  }
  manifest = {
    "source": f"standard library of CPython {platform.python_version()}",
    "licence": "PSF-2.0",
    **digests,
  }
  held = (
    io.TextIOWrapper(io.BytesIO(x), "utf-8").read()
    for x in contents["held_out"].values()
  )
  begun = [text for file in held for text in prompts(file)]

  def write(folder: Path) -> None:
    for part, texts in contents.items():
      for name, content in texts.items():
        (folder / part / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / part / name).write_bytes(content)
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in begun)
    (folder / "prompts.jsonl").write_text(lines)
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text)

  files.replace_folder(output, write)
  for part, texts in contents.items():
    size = sum(map(len, texts.values()))
    terminal.report(f"{part}: {len(texts)} files, {size / 1e6:.2f} MB")
  terminal.report(f"prompts: {len(begun)}")


main = _main.main_of("stdlib_corpus", write_corpus)

if __name__ == "__main__":
  _main.start(main)
