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

# Licences whose text may be learned from: by SPDX, and as classifiers and the
# metadata field of old name them. Lower case.
_SPDX = {
  "0bsd", "apache-2.0", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "hpnd",
  "isc", "mit", "mit-0", "mit-cmu", "psf-2.0", "python-2.0", "unlicense",
  "zlib",
}  # fmt: skip
_NAMED = _SPDX | {
  "3-clause bsd", "3-clause bsd license", "apache", "apache 2.0",
  "apache license", "apache license 2.0", "apache license version 2.0",
  "apache license, version 2.0", "apache software license",
  "apache software license 2.0", "apache-2", "bsd", "bsd 2-clause",
  "bsd 3-clause", "bsd 3-clause license", "bsd license", "bsd-2", "bsd-3",
  "isc license", "isc license (iscl)", "mit license", "modified bsd license",
  "new bsd", "new bsd license", "psf", "psf license", "psfl",
  "python software foundation license", "simplified bsd", "the mit license",
  "the mit license (mit)",
}  # fmt: skip
_COPYLEFT = re.compile(
  r"gpl|gnu|mpl|mozilla|cddl|eupl|epl-|sspl|osl-|share ?alike|cc-by-(sa|nc)",
  re.IGNORECASE,
)
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
      let its text be used. Of a licence expression, classifiers and the field
      of old the first that is there decides.
  """
  try:
    metadata = importlib.metadata.metadata(name)
  except importlib.metadata.PackageNotFoundError:
    raise ValueError(f"package {name} is not installed") from None
  expression = metadata.get("License-Expression") or ""
  # The field of old may hold the licence's whole text.
  first, *rest = (metadata.get("License") or "").strip().splitlines() or [""]
  classifiers = [
    x.split(" :: ")[-1]
    for x in metadata.get_all("Classifier") or []
    if x.startswith("License ::") and x != "License :: OSI Approved"
  ]
  if expression:
    stated, is_known = [expression], _is_permissive(expression)
  else:
    stated = [*classifiers] or [first]
    is_known = all(x.strip().casefold() in _NAMED for x in stated)
    # Wheels of the classified quote licences of libraries that they bring.
    others = [first] if classifiers else [first, *rest]
    hidden = [x for x in others if x not in stated and _COPYLEFT.search(x)]
    stated, is_known = stated + hidden, is_known and not hidden
  if not is_known:
    raise ValueError(
      f"package {name} says {', '.join(stated) or 'nothing':.80} of its "
      f"licence; accepted: {', '.join(sorted(_SPDX))} and their names of old"
    )
  return stated[0]


def _is_permissive(expression: str) -> bool:
  """Whether every licence that an SPDX expression requires is known; of those
  with OR between them, all must be."""
  terms = re.split(r"\s+(?:and|or)\s+|[()]", expression.casefold())
  terms = [x.strip() for x in terms if x.strip()]
  # Exceptions grant more than their licence does.
  return all(re.sub(r"\s+with\s+\S+$", "", x) in _SPDX for x in terms)


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
        if name in parts[part]:  # of another package
          name = f"{origin.name}/{name}"
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
