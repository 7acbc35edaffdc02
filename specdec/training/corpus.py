"""The corpus of the shipped models: Python that is installed here.

An interpreter's standard library, and packages whose licences let their text be
used.

Invariant: a corpus is replaced as a whole, and a folder that is no corpus is
never replaced.
"""

import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
  # Other people's, under licences of their own.
  "_vendor",
  "_vendored",
  "extern",
  "externals",
  "third_party",
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

# Words of licences whose text may be learned from, and words that none has.
LICENCES = ("BSD", "MIT", "Apache", "PSF", "Python Software Foundation", "ISC")
_COPYLEFT = ("GPL", "GNU", "MPL", "Mozilla")
# Characters of a package's file, and of its lines on average, past which it is
# a table.
LARGEST, LONGEST_LINE = 300_000, 80

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


class Origin(NamedTuple):
  """Where files of a corpus come from."""

  name: str
  version: str
  licence: str
  held_out: tuple[str, ...]  # first parts of the names of files to hold out
  files: dict[str, str]  # name -> text


def _texts(root: Path, names: Iterator[Path]) -> dict[str, str]:
  """Returns the texts of modules below `root`, without those in no UTF-8."""
  texts = {}
  for name in sorted(names):
    if not is_included(name):
      continue
    try:
      content = (root / name).read_bytes().decode()
    except (FileNotFoundError, UnicodeDecodeError):
      continue
    if content.strip():
      texts[name.as_posix()] = content
  return texts


def stdlib() -> Origin:
  """Reads this interpreter's standard library."""
  root = Path(sysconfig.get_paths()["stdlib"])
  names = (path.relative_to(root) for path in root.rglob("*.py"))
  texts = _texts(root, names)
  version = platform.python_version()
  return Origin("CPython", version, "PSF-2.0", HELD_OUT, texts)


def licence_of(name: str) -> str:
  """Returns the licence that an installed package states.

  Raises:
    ValueError: it is not installed, states none, or one that is not known to
      let its text be used.
  """
  try:
    metadata = importlib.metadata.metadata(name)
  except importlib.metadata.PackageNotFoundError:
    raise ValueError(f"package {name} is not installed") from None
  classifiers = metadata.get_all("Classifier") or []
  prefix = "License ::"
  stated = [metadata.get("License-Expression") or ""]
  stated += [x.split(" :: ")[-1] for x in classifiers if x.startswith(prefix)]
  # The field of old may hold the licence's whole text.
  stated += (metadata.get("License") or "").strip().splitlines()[:1]
  stated = [x for x in stated if x and x != "OSI Approved"]
  said = stated[0] if stated else "nothing"
  whole = " ".join(stated)
  if any(word in whole for word in _COPYLEFT):
    raise ValueError(f"package {name} is under {said}, which is copyleft")
  if not any(re.search(rf"\b{word}", whole) for word in LICENCES):
    raise ValueError(
      f"package {name} says {said} of its licence; known are "
      f"{', '.join(LICENCES)}"
    )
  return said


def package(name: str, held_out: bool = False) -> Origin:
  """Reads an installed package's modules, without tables and long files.

  Raises:
    ValueError: as licence_of, or it has no Python.
  """
  licence = licence_of(name)
  distribution = importlib.metadata.distribution(name)
  root = Path(distribution.locate_file("")).resolve()
  names = (Path(x) for x in distribution.files or () if x.suffix == ".py")
  texts = _texts(root, (x for x in names if ".." not in x.parts))
  texts = {
    path: text
    for path, text in texts.items()
    if len(text) <= LARGEST
    and len(text) <= LONGEST_LINE * (1 + text.count("\n"))
  }
  if not texts:
    raise ValueError(f"package {name} has no Python")
  firsts = tuple(sorted({path.split("/")[0] for path in texts}))
  firsts = firsts if held_out else ()
  return Origin(name, distribution.version, licence, firsts, texts)


def write(
  output: Path, packages: Sequence[str] = (), held_out: Sequence[str] = ()
) -> dict[str, list[int]]:
  """Copies this interpreter's standard library and packages to a folder.

  Writes train/, held_out/, prompts.jsonl and manifest.json, which has where
  files come from, under which licence, and the SHA-256 of every one. A text
  that is there twice is taken once.

  Args:
    output: the folder, which is replaced.
    packages: installed distributions.
    held_out: such whose every file is held out.

  Returns:
    The sizes in bytes of the files of 'train' and of 'held_out', and the
    lengths in characters of 'prompts'.

  Raises:
    ValueError: `output` holds something else, or a package cannot be used.
    BlockingIOError: another process writes there.
    NotWritten: the disk is full, for example.
  """
  files.restore(output)
  present = {x.name for x in output.glob("*")} - {".lock"}
  if present and "manifest.json" not in present:
    raise ValueError(f"{output} exists and is no corpus; not replaced")
  origins = [stdlib()]
  origins += [package(name, held_out=True) for name in held_out]
  origins += [package(name) for name in packages]
  run_folder.lock(output)
  parts: dict[str, dict[str, str]] = {"train": {}, "held_out": {}}
  hashes: dict[str, dict[str, str]] = {"train": {}, "held_out": {}}
  seen = set()
  for origin in origins:
    for name, text in origin.files.items():
      digest = hashlib.sha256(text.encode()).hexdigest()
      if digest not in seen:
        seen.add(digest)
        is_held_out = name.split("/")[0] in origin.held_out
        part = "held_out" if is_held_out else "train"
        parts[part][name], hashes[part][name] = text, digest
  beginnings = [
    x
    for name, text in parts["held_out"].items()
    if name.split("/")[0] in HELD_OUT
    for x in prompts(text)
  ]
  sources = [x._asdict() | {"files": len(x.files)} for x in origins]
  manifest = {"sources": sources} | hashes

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
