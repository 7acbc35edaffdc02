"""Pictures of rounds: where boxes stand, what they say, and a valid file."""

import math
import sys
import xml.etree.ElementTree as ET

import numpy as np

from specdec.benchmark.round_trace import Round
from specdec.benchmark.setup import Setup
from specdec.report import page, round_picture
from specdec.report.answer import Answer, Token
from specdec.report.round_picture import COLUMN, ROW
from specdec.types import ACCEPTED, BASELINE, BONUS, CORRECTION, NO_DRAFT
from specdec.utils.terminal import Painter

HALF = math.log(0.5)


def a_round(parents, path, cut=()):
  nodes = len(parents)
  probs = np.full(nodes, HALF)
  return Round(np.arange(nodes), np.array(parents), probs, probs, path, cut)


def token(origin, id=9):
  return Token(id, "x", origin, HALF, NO_DRAFT)


def spell(id):
  return {3: "</text>", 9: "\n "}.get(id, f"t{id}")


def test_a_chain_is_a_line_and_its_correction_beneath_the_refused_token():
  drawing = round_picture.draw(
    a_round([-1, 0, 1, 2, 3], [1, 2]), token(CORRECTION), spell
  )
  kinds = ["pending", "accepted", "accepted", "refused", "unread", "correction"]
  assert [box.kind for box in drawing.boxes] == kinds
  places = [(box.x // COLUMN, box.y // ROW) for box in drawing.boxes]
  assert places == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (3, 1)]
  assert drawing.boxes[-1].above == (2 * COLUMN, 0)
  assert drawing.boxes[-1].text == "↵␣"
  assert drawing.boxes[1].note == "draft 0.50 · target 0.50"
  assert drawing.boxes[-1].note == "target 0.50"
  assert drawing.sentence == (
    "4 drafted, 2 accepted, one corrected: 3 tokens by one pass"
  )


def test_accepted_tokens_after_the_end_are_cut_not_refused():
  one = a_round([-1, 0, 1, 2, 3], [1], [2, 3])
  drawing = round_picture.draw(one, None, spell)
  kinds = ["pending", "accepted", "cut", "cut", "refused"]
  assert [box.kind for box in drawing.boxes] == kinds
  assert drawing.sentence == (
    "4 drafted, 1 accepted, 2 more cut where the text ends: 1 token by one pass"
  )


def test_a_tree_has_a_line_a_leaf():
  #      0 - 1 - 3 - 4
  #        - 2 - 5       accepted: 2, 5
  one = a_round([-1, 0, 0, 1, 3, 2], [2, 5])
  drawing = round_picture.draw(one, token(BONUS), spell)
  places = [(box.x // COLUMN, box.y // ROW) for box in drawing.boxes]
  assert places == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
  assert [box.kind for box in drawing.boxes] == [
    "pending", "refused", "accepted", "unread", "unread", "accepted", "bonus",
  ]  # fmt: skip
  lines = round_picture.as_text(
    drawing, Painter("never", sys.stdout)
  ).splitlines()
  assert [line.split() for line in lines[1:]] == [
    ["t0", "✗t1", "</text>", "t4"],
    ["✓t2", "✓t5", "+↵␣"],
  ]


def test_rounds_without_a_draft_or_an_end():
  alone = round_picture.draw(a_round([-1], []), token(BASELINE), spell)
  assert alone.sentence == "nothing drafted: 1 token by one pass of the target"
  cut = round_picture.draw(a_round([-1, 0], [1]), None, spell)
  assert cut.sentence == "1 drafted, 1 accepted: 1 token by one pass"
  assert len(cut.boxes) == 2


def answer():
  ours = Answer(None)
  ours.tokens = [token(ACCEPTED, 1), token(CORRECTION), token(ACCEPTED, 3)]
  ours.rounds = [a_round([-1, 0, 1], [1]), a_round([-1, 0], [1])]
  return ours


def test_a_picture_is_xml_and_holds_every_token(tmp_path):
  path = tmp_path / "rounds.svg"
  round_picture.write(str(path), Setup(), answer(), None)
  text = path.read_text()
  whole = "".join(ET.fromstring(text).itertext())
  for part in (
    "Round 1: 2 drafted",
    "Round 2: 1 drafted",
    "stdlib-11m, model(",
  ):
    assert part in whole
  assert "http://www.w3.org/2000/svg" in text
  assert text.count("http") == 1  # it loads nothing


def test_a_page_has_a_drawing_a_round():
  section = page.section([1, 2], answer(), None)
  text = page.render([("target", "tiny")], [], [section], [])
  assert text.count("<template>") == text.count('class="round"') == 2
  assert text.count('class="stage"') == 1
  bare = page.render([], [], [section._replace(drawings=())], [])
  assert "<template>" not in bare and 'class="stage"' not in bare
