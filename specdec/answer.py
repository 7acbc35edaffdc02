"""The text of one row as it grows, cut where a stop string begins.

Invariant: what was shown is never taken back; text that may be the beginning of
a stop string is held until that is decided.
"""

import sys
from collections.abc import Iterable, Sequence

from specdec.checkpoints import TextStream, Tokenizer
from specdec.display import Painter


class Answer:
  """New tokens of one row.

  Attributes:
    ids: the tokens, up to the one that completed a stop string.
    text: what they say, without the stop string; '' without a tokenizer.
    stopped: whether a stop string came.
  """

  def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str] = ()):
    self.ids: list[int] = []
    self.text = ""
    self.stopped = False
    self._stops = tuple(stops)
    self._stream = TextStream(tokenizer) if tokenizer else None
    self._pieces: list[tuple[str, int]] = []  # text and its origin
    self._shown = 0  # pieces

  def push(self, ids: Iterable[int], origins: Iterable[int]) -> None:
    """Takes further tokens; those after a stop string are dropped."""
    for token, origin in zip(ids, origins):
      if self.stopped:
        return
      self.ids.append(int(token))
      if self._stream is None:
        self._pieces.append((f"{token} ", int(origin)))
      else:
        self._take(self._stream.push([token]), int(origin))

  def finish(self) -> None:
    """No more tokens will come: gives out the bytes that were held back."""
    if self._stream is not None and not self.stopped:
      self._take(self._stream.finish(), 0)

  def show(self, painter: Painter, ended: bool = True) -> None:
    """Prints what is certain and was not printed yet; all of it once ended."""
    keep = 0
    if not (ended or self.stopped):
      keep = max((len(stop) - 1 for stop in self._stops), default=0)
    waiting = sum(len(text) for text, _ in self._pieces[self._shown :])
    while self._shown < len(self._pieces):
      text, origin = self._pieces[self._shown]
      waiting -= len(text)
      if waiting < keep:
        break
      sys.stdout.write(painter.paint(text, origin))
      self._shown += 1
    sys.stdout.flush()

  def _take(self, text: str, origin: int) -> None:
    self._pieces.append((text, origin))
    self.text += text
    hits = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
    if not hits:
      return
    excess = len(self.text) - min(hits)
    self.text, self.stopped = self.text[: min(hits)], True
    while excess:
      text, origin = self._pieces.pop()
      kept = text[: max(len(text) - excess, 0)]
      excess -= len(text) - len(kept)
      if kept:
        self._pieces.append((kept, origin))
