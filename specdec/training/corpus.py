"""The corpus of the shipped models: an interpreter's standard library.

Invariant: a corpus is replaced as a whole, and a folder that is no corpus is
never replaced.
"""

import hashlib
import json
import platform
import sysconfig
from pathlib import Path

from specdec.utils import files, run_folder

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


def is_included(path: Path) -> bool:
  """Whether a module, by its path in the library, belongs to the corpus."""
  if path.as_posix() in SKIPPED_FILES:
    return False
  return not any(
    part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES)
    for part in path.parts
  )


def prompts(text: str) -> list[str]:
  """Returns beginnings of a module that end with the first line of a function.

  The end of that line is left out: in most vocabularies it is one token with
  the spaces that follow it.
  """
  text = text.replace("\r\n", "\n").replace("\r", "\n")
  lines = text.splitlines(keepends=True)
  ends = [i + 1 for i, line in enumerate(lines) if line.endswith("):\n")]
  texts = ["".join(lines[:end]) for end in ends if "def " in lines[end - 1]]
  texts = [text.rstrip("\n") for text in texts]
  long = [text[-PROMPT_SIZE:] for text in texts if len(text) >= PROMPT_SIZE]
  return long[:: -(-len(long) // PROMPTS)] if long else []


def write_stdlib(output: Path) -> dict[str, list[int]]:
  """Copies this interpreter's standard library to the folder `output`.

  Writes train/, held_out/, prompts.jsonl and manifest.json, which has the
  interpreter's version and the SHA-256 of every file.

  Returns:
    The sizes in bytes of the files of 'train' and of 'held_out', and the
    lengths in characters of 'prompts'.

  Raises:
    ValueError: `output` holds something else.
    BlockingIOError: another process writes there.
    NotWritten: the disk is full, for example.
  """
  library = Path(sysconfig.get_paths()["stdlib"])
  files.restore(output)
  present = {x.name for x in output.glob("*")} - {".lock"}
  if present and "manifest.json" not in present:
    raise ValueError(f"{output} exists and is no corpus; not replaced")
  run_folder.lock(output)
  parts: dict[str, dict[str, str]] = {"train": {}, "held_out": {}}
  for path in sorted(library.rglob("*.py")):
    name = path.relative_to(library)
    if not is_included(name):
      continue
    try:
      content = path.read_bytes().decode()
    except UnicodeDecodeError:
      continue
    if content.strip():
      part = "held_out" if name.parts[0] in HELD_OUT else "train"
      parts[part][name.as_posix()] = content
  beginnings = [x for text in parts["held_out"].values() for x in prompts(text)]
  manifest = {
    "source": f"standard library of CPython {platform.python_version()}",
    "licence": "PSF-2.0",
  } | {
    part: {
      name: hashlib.sha256(text.encode()).hexdigest()
      for name, text in texts.items()
    }
    for part, texts in parts.items()
  }

  def write(folder: Path) -> None:
    for part, texts in parts.items():
      for name, text in texts.items():
        (folder / part / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / part / name).write_bytes(text.encode())
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in beginnings)
    (folder / "prompts.jsonl").write_text(lines)
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / "manifest.json").write_text(text)

  files.replace_folder(output, write)
  sizes = {
    part: [len(text.encode()) for text in texts.values()]
    for part, texts in parts.items()
  }
  return sizes | {"prompts": [len(text) for text in beginnings]}
