"""Draws a round: the draft as a tree, what was accepted, and what follows.

Time runs to the right. A chain is one line; where a token is refused, what the
target says in its place stands beneath it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.benchmark.round_trace import Round
from specdec.benchmark.setup import Setup
from specdec.checkpoints import Tokenizer
from specdec.report import html
from specdec.report.answer import Answer, Token, Watch, rounds_of
from specdec.types import ACCEPTED, BASELINE, BONUS, CORRECTION, NO_DRAFT
from specdec.utils import files
from specdec.utils.terminal import Painter

COLUMN, ROW, WIDTH, HEIGHT = 112, 50, 96, 40  # pixels
SIZES = {"width": WIDTH, "height": HEIGHT}
_ROUNDS = 3  # of a picture
_LONGEST = 11  # characters of a token
_KINDS = {CORRECTION: "correction", BONUS: "bonus", BASELINE: "baseline"}
_ENDINGS = {
  CORRECTION: "one corrected",
  BONUS: "one more",
  BASELINE: "one drawn",
}
_MARKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥"})
_SIGNS = {  # of a terminal, which may have no colours
  "accepted": "✓",
  "refused": "✗",
  "correction": "+",
  "bonus": "+",
  "baseline": "+",
}

# Returns the text of a token id.
Spell = Callable[[int], str]


class Box(NamedTuple):
  """One token; x and y of its left upper corner."""

  x: int
  y: int
  kind: str  # 'pending', 'accepted', 'cut', 'refused', 'unread' or of _KINDS
  text: str
  note: str  # its probabilities
  above: tuple[int, int] | None  # corner of the box that it follows


class Drawing(NamedTuple):
  """A round's boxes, and a sentence on it."""

  boxes: Sequence[Box]
  width: int
  height: int
  sentence: str


def draw(one: Round, ending: Token | None, spell: Spell) -> Drawing:
  """Lays out a round.

  Args:
    ending: the token after the accepted ones; None: the round was cut.
  """
  parents, path = [*map(int, one.parents)], [0, *one.path]
  kinds = [
    "accepted" if node in path
    else "cut" if node in one.cut
    else "refused" if parents[node] in [*path, *one.cut]
    else "unread"
    for node in range(len(parents))
  ]  # fmt: skip
  kinds[0] = "pending"
  texts = [_shown(spell(int(token))) for token in one.tokens]
  notes = [
    f"draft {_share(q)} · target {_share(p)}"
    for q, p in zip(one.draft_log_probs, one.log_probs)
  ]
  notes[0] = "the text so far"
  if ending is not None:
    parents.append(path[-1])
    kinds.append(_KINDS[ending.origin])
    texts.append(_shown(spell(ending.id)))
    drafted = ending.draft_log_prob
    draft = "" if drafted == NO_DRAFT else f"draft {_share(drafted)} · "
    notes.append(f"{draft}target {_share(ending.log_prob)}")
  places = _places(parents)
  boxes = [
    Box(
      *places[n],
      kinds[n],
      texts[n],
      notes[n],
      places[parents[n]] if n else None,
    )
    for n in range(len(parents))
  ]
  width = max(x for x, _ in places) + WIDTH
  height = max(y for _, y in places) + HEIGHT
  return Drawing(boxes, width, height, _sentence(one, ending))


def draw_all(
  rounds: Sequence[Round], blocks: Sequence[Sequence[Token]], spell: Spell
) -> list[Drawing]:
  """Lays out the rounds of a text; blocks: the tokens that each committed."""
  return [
    draw(one, block[-1] if block[-1].origin != ACCEPTED else None, spell)
    for one, block in zip(rounds, blocks)
  ]


def _places(parents: Sequence[int]) -> list[tuple[int, int]]:
  """Returns corners: a column a level, a line a leaf, a parent level with its
  first child."""
  children: list[list[int]] = [[] for _ in parents]
  for node, parent in enumerate(parents[1:], 1):
    children[parent].append(node)
  places, lines, left = [(0, 0)] * len(parents), 0, [(0, 0)]
  while left:  # depth first
    node, depth = left.pop()
    places[node] = depth * COLUMN, lines * ROW
    if not children[node]:
      lines += 1
    left += [(child, depth + 1) for child in reversed(children[node])]
  return places


def _sentence(one: Round, ending: Token | None) -> str:
  drafted, kept = len(one.tokens) - 1, len(one.path)
  count = kept + (ending is not None)
  tokens = "1 token" if count == 1 else f"{count} tokens"
  follows = "" if ending is None else f", {_ENDINGS[ending.origin]}"
  if not drafted:
    return f"nothing drafted: {tokens} by one pass of the target"
  cut = f", {len(one.cut)} more cut where the text ends" if one.cut else ""
  return (
    f"{drafted} drafted, {kept} accepted{follows}{cut}: {tokens} by one pass"
  )


def _shown(text: str) -> str:
  text = text.translate(_MARKS) or "·"
  return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _share(log_prob: float) -> str:
  share = min(math.exp(log_prob), 1.0)
  return "0" if share == 0 else "<.01" if share < 0.01 else f"{share:.2f}"


def as_text(drawing: Drawing, painter: Painter) -> str:
  """Returns a drawing in lines for a terminal, without probabilities: ✓ marks
  an accepted token, ✗ a refused one, + the target's own."""
  widths: dict[int, int] = {}
  for box in drawing.boxes:
    widths[box.x] = max(widths.get(box.x, 0), len(_marked(box)))
  lines = [f"  {painter.dim(drawing.sentence)}"]
  for y in sorted({box.y for box in drawing.boxes}):
    row = {box.x: box for box in drawing.boxes if box.y == y}
    cells = [
      _cell(row[x], painter) + " " * (width - len(_marked(row[x])))
      if x in row
      else " " * width
      for x, width in sorted(widths.items())
    ]
    lines.append(f"    {' '.join(cells)}".rstrip())
  return "\n".join(lines)


def watcher(tokenizer: Tokenizer | None, painter: Painter) -> Watch:
  """Returns what prints rounds as they come."""
  spell = spelling(tokenizer)

  def watch(one: Round, added: Sequence[Token]) -> None:
    [drawing] = draw_all([one], [added], spell)
    print(as_text(drawing, painter), flush=True)

  return watch


def spelling(tokenizer: Tokenizer | None) -> Spell:
  """Returns what spells a token id: its text, or without a tokenizer itself."""
  return str if tokenizer is None else lambda x: tokenizer.decode([x], False)


def _marked(box: Box) -> str:
  return _SIGNS.get(box.kind, "") + box.text


def _cell(box: Box, painter: Painter) -> str:
  origins = {kind: origin for origin, kind in _KINDS.items()}
  origins["accepted"] = ACCEPTED
  text = _marked(box)
  if box.kind in origins:
    return painter.paint(text, origins[box.kind])
  return (painter.struck if box.kind == "refused" else painter.dim)(text)


def write(
  path: str, setup: Setup, answer: Answer, tokenizer: Tokenizer | None
) -> None:
  """Writes the first rounds of a text as a picture (SVG)."""
  blocks = rounds_of(answer.tokens)[:_ROUNDS]
  drawings = draw_all(answer.rounds, blocks, spelling(tokenizer))
  about = (
    f"{setup.target}, {setup.description}, {setup.acceptance}, temperature "
    f"{setup.temperature:g}; probabilities of the draft as it drew, "
    "of the target at 1"
  )
  text = html.render("rounds.svg", drawings=drawings, about=about, sizes=SIZES)
  files.replace_text(path, text)
