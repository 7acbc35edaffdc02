"""Terminal output: tokens styled by origin, tables and progress.

The colours (blue, orange, purple; after Okabe and Ito) are distinguishable with
colour blindness, and underline or bold repeat the distinction. Invariant: text
from models, files and users passes `escape`, so that the terminal interprets
none of it.
"""

import contextlib
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TextIO

from tqdm import tqdm

from specdec.types import ACCEPTED, BASELINE, BONUS, CORRECTION
from specdec.utils.spelling import check_choice

NAMES = {
  ACCEPTED: "accepted draft",
  CORRECTION: "correction",
  BONUS: "bonus",
  BASELINE: "no draft",
}
_STYLES = {
  ACCEPTED: "38;5;33",  # blue
  CORRECTION: "4;38;5;208",  # orange, underlined
  BONUS: "1;38;5;170",  # purple, bold
  BASELINE: "",
}

# Unicode categories: control, format (with bidirectional controls), line and
# paragraph separators, private use, surrogates.
_UNSAFE = frozenset(("Cc", "Cf", "Zl", "Zp", "Co", "Cs"))
_JOINERS = "\u200c\u200d"  # emoji and several scripts need them


def is_unsafe(character: str) -> bool:
  """Whether a character is invisible or would be interpreted by a terminal."""
  return (
    unicodedata.category(character) in _UNSAFE and character not in _JOINERS
  )


def escape(text: str, keep: str = "\n\t") -> str:
  """Replaces unsafe characters by escape sequences, except those in `keep`."""
  return "".join(
    character.encode("unicode_escape").decode()
    if is_unsafe(character) and character not in keep
    else character
    for character in text
  )


def report(text: object, file: TextIO | None = None) -> None:
  """Prints escaped text to a file, by default standard output."""
  print(escape(str(text)), file=file)


class Painter:
  """Escapes text and, if colour is enabled, styles it by origin."""

  def __init__(self, mode: str, out: TextIO):
    """Styles 'always', 'never' or 'auto': on a terminal without NO_COLOR."""
    check_choice("color =", mode, ("auto", "always", "never"), "; accepted")
    auto = out.isatty() and "NO_COLOR" not in os.environ
    self.colored = mode == "always" or (mode == "auto" and auto)

  def paint(self, text: str, origin: int) -> str:
    """Returns text in the style of an origin (types.ACCEPTED, ...)."""
    return self._wrap(text, _STYLES.get(origin, ""))

  def dim(self, text: str) -> str:
    """Returns text in a dim style, for remarks about the output."""
    return self._wrap(text, "2")

  def struck(self, text: str) -> str:
    """Returns text in the style of a draft token that was refused."""
    return self._wrap(text, "2;9")

  def legend(self) -> str:
    """Returns one line with the name of every style."""
    names = [self.paint(name, origin) for origin, name in NAMES.items()]
    return self.dim("tokens: ") + self.dim(" · ").join(names)

  def _wrap(self, text: str, style: str) -> str:
    text = escape(text)
    if not (self.colored and style and text):
      return text
    # Styled line by line, because pagers reset styles at line ends.
    lines = text.split("\n")
    return "\n".join(
      f"\x1b[{style}m{line}\x1b[0m" if line else "" for line in lines
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Formats a table, with all columns but the first right-aligned."""
  lines = [[escape(entry, "") for entry in row] for row in (header, *rows)]
  widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
  return "\n".join(
    "  "
    + "  ".join(
      f"{entry:<{width}}" if i == 0 else f"{entry:>{width}}"
      for i, (entry, width) in enumerate(zip(line, widths))
    ).rstrip()
    for line in lines
  )


def table(rows: Sequence[tuple[str, str]]) -> str:
  """Formats (name, value) rows as two aligned columns."""
  rows = [(escape(name, ""), escape(value)) for name, value in rows]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"  {name:<{width}}   {value}" for name, value in rows)


@contextlib.contextmanager
def progress(what: str, every: float = 15.0) -> Iterator[None]:
  """Reports the body's start, elapsed time and duration on stderr."""
  start, ended = time.perf_counter(), threading.Event()

  def write(suffix: str = "") -> None:
    elapsed = f" {time.perf_counter() - start:.1f} s{suffix}"
    tqdm.write(escape(f"{what} ...{elapsed}"), file=sys.stderr)
    sys.stderr.flush()

  def report_periodically() -> None:
    while not ended.wait(every):
      write(" so far")

  tqdm.write(escape(f"{what} ..."), file=sys.stderr)
  sys.stderr.flush()
  thread = threading.Thread(target=report_periodically, daemon=True)
  thread.start()
  try:
    yield
    ended.set()
    write()
  finally:
    ended.set()
    thread.join()
