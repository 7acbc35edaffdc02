"""Tokens by origin in a terminal, and small tables.

Colours are chosen to survive colour blindness (blue, orange, purple; after
Okabe and Ito), and each kind is also underlined or bold so that none rests on
colour alone. Invariant: what a model, a file or a user wrote reaches the
terminal through `escape`, so that none of it is obeyed there.
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


# Controls, marks of format (turns of direction among them), line and paragraph
# separators, private use, surrogates.
_UNSAFE = frozenset(("Cc", "Cf", "Zl", "Zp", "Co", "Cs"))
_JOINERS = "\u200c\u200d"  # emoji and several scripts need them


def is_unsafe(character: str) -> bool:
  """Whether a reader would not see it, or a terminal would obey it."""
  return (
    unicodedata.category(character) in _UNSAFE and character not in _JOINERS
  )


def escape(text: str, keep: str = "\n\t") -> str:
  """Spells out the characters that are unsafe, `keep` excepted."""
  return "".join(
    character.encode("unicode_escape").decode()
    if is_unsafe(character) and character not in keep
    else character
    for character in text
  )


def report(text: object, file: TextIO | None = None) -> None:
  """Prints escaped text, to standard output unless a file is given."""
  print(escape(str(text)), file=file)


class Painter:
  """Escapes text, and where there is colour gives it its origin's style."""

  def __init__(self, mode: str, out: TextIO):
    if mode not in ("auto", "always", "never"):
      raise ValueError(f"color = {mode!r}; accepted: auto, always, never")
    auto = out.isatty() and "NO_COLOR" not in os.environ
    self.colored = mode == "always" or (mode == "auto" and auto)

  def paint(self, text: str, origin: int) -> str:
    """`text` as a token of that origin looks."""
    return self._wrap(text, _STYLES.get(origin, ""))

  def dim(self, text: str) -> str:
    """`text` for what is said about the output, not the output itself."""
    return self._wrap(text, "2")

  def legend(self) -> str:
    """One line naming the styles."""
    names = [self.paint(name, origin) for origin, name in NAMES.items()]
    return self.dim("tokens: ") + self.dim(" · ").join(names)

  def _wrap(self, text: str, style: str) -> str:
    text = escape(text)
    if not (self.colored and style and text):
      return text
    # A style must not run across line ends: pagers and terminals reset there.
    lines = text.split("\n")
    return "\n".join(
      f"\x1b[{style}m{line}\x1b[0m" if line else "" for line in lines
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table: the first column to the left, numbers to the right."""
  lines = [[escape(cell, "") for cell in row] for row in (header, *rows)]
  widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
  return "\n".join(
    "  "
    + "  ".join(
      f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
      for i, (cell, width) in enumerate(zip(line, widths))
    ).rstrip()
    for line in lines
  )


def table(rows: Sequence[tuple[str, str]]) -> str:
  """Two aligned columns."""
  rows = [(escape(name, ""), escape(value)) for name, value in rows]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"  {name:<{width}}   {value}" for name, value in rows)


@contextlib.contextmanager
def progress(what: str, every: float = 15.0) -> Iterator[None]:
  """Prints what begins, its seconds every so often, and those that it took.

  The lines go to stderr, above a progress bar where there is one.
  """
  begin, ended = time.perf_counter(), threading.Event()

  def say(end: str) -> None:
    tqdm.write(escape(f"{what} ...{end}"), file=sys.stderr)
    sys.stderr.flush()

  def elapsed() -> str:
    return f" {time.perf_counter() - begin:.1f} s"

  def tick() -> None:
    while not ended.wait(every):
      say(f"{elapsed()} so far")

  say("")
  ticking = threading.Thread(target=tick, daemon=True)
  ticking.start()
  try:
    yield
    ended.set()
    say(elapsed())
  finally:
    ended.set()
    ticking.join()
