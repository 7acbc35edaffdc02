"""The HTML page of a generation is complete, escaped and self-contained."""

import html.parser
import math
import re

import pytest

from specdec.benchmark.batches import NewTokens
from specdec.report import page
from specdec.report.answer import Answer, Token, rounds_of
from specdec.types import ACCEPTED, BASELINE, BONUS, CORRECTION, NO_DRAFT

VOID = {"meta", "br", "link", "img", "input"}
NASTY = (
  "<script>alert('1')</script> & \"q\" <!-- </style> {{ title }} \x00\x1b\u202e"
)
TOKENS = [
  Token(0, "The", BASELINE, math.log(0.5), NO_DRAFT),
  Token(1, "\n  old", ACCEPTED, math.log(0.25), math.log(0.75)),
  Token(2, "", ACCEPTED, math.log(0.9), 0.0),
  Token(3, NASTY, CORRECTION, math.log(2e-5), -math.inf),
  Token(4, " \ud83d", ACCEPTED, 1e-7, 0.0),
  Token(5, " end", BONUS, 0.0, NO_DRAFT),
  Token(6, "\u200d", ACCEPTED, 0.0, 0.0),
]


class Reader(html.parser.HTMLParser):
  """Elements in order, balance, and the answers' text without the tips."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.elements = [], []
    self.answers, self.tips = [], []
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in VOID:
      self.open.append((tag, dict(attrs).get("class") or ""))
    if "answer" in self.classes():
      where = {"answer": self.answers, "tip": self.tips}
      where.get(self.open[-1][1], []).append("")

  def handle_endtag(self, tag):
    assert self.open and self.open.pop()[0] == tag

  def handle_data(self, data):
    classes = self.classes()
    if "tip" in classes:
      self.tips[-1] += data
    elif "answer" in classes and "mark" not in classes:
      self.answers[-1] += data

  def classes(self):
    return " ".join(name for _, name in self.open).split()

  def of_class(self, name):
    return [a for _, a in self.elements if name in a.get("class", "").split()]


def render(*sections, settings=(("target", "tiny"),), summary=()):
  return page.render(settings, [("speedup", "2.00 x")], sections, summary)


def section(tokens=TOKENS, prompt="Say", names=()):
  return page.Section(prompt, 3, tokens, names)


def test_rounds_end_with_a_token_of_the_targets_own():
  lengths = [len(block) for block in rounds_of(TOKENS)]
  assert lengths == [1, 3, 2, 1]  # the last was cut at an accepted token
  assert [t for block in rounds_of(TOKENS) for t in block] == TOKENS
  assert rounds_of([]) == []


def test_every_token_is_there_once_with_its_text_as_it_was():
  reader = Reader(render(section()))
  (answer,) = reader.answers
  whole = "".join(token.text for token in TOKENS)
  for sign in ("\x00␀", "\x1b␛", "\u202e[U+202E]", "\ud83d[U+D83D]"):
    whole = whole.replace(sign[0], sign[1:])
  assert answer == whole
  spans = [a for a in reader.of_class("t") if "tabindex" in a]
  assert len(spans) == len(reader.tips) == len(TOKENS)
  identities = [a["id"] for a in reader.of_class("tip")]
  assert len(set(identities)) == len(TOKENS)
  assert [a["aria-describedby"] for a in spans] == identities
  kinds = [a["class"].split()[1] for a in spans]
  assert kinds[:4] == ["baseline", "accepted", "accepted", "correction"]
  assert [i for i, a in enumerate(spans) if "none" in a["class"]] == [2, 6]
  assert len(reader.of_class("round")) == 4


def test_a_tip_says_round_place_and_probabilities():
  reader = Reader(render(section(names=["t"] * 2 + ["<0xE2>"])))
  tips = [re.sub(r"\s+", " ", tip).strip() for tip in reader.tips]
  assert tips[0] == (
    "“The” no draft · id 0 round 1, token 1 of 1 draft not drafted target 0.500"
  )
  assert tips[1].startswith("“↵ old” accepted draft · id 1 round 2, token 1 of")
  assert tips[1].endswith("draft 0.750 target 0.250")
  assert tips[2].startswith("<0xE2> accepted draft · id 2 · no text of its own")
  assert tips[3].endswith("round 2, token 3 of 3 draft 0.000 target 2.0e-05")
  assert tips[4].endswith("draft 1.000 target 1.000")
  assert tips[5].endswith(
    "round 3, token 2 of 2 draft not drafted target 1.000"
  )


def test_nothing_from_outside_becomes_markup():
  names = [NASTY] * 7
  text = render(
    section(prompt=NASTY, names=names),
    settings=[("target", NASTY), (NASTY, NASTY)],
    summary=[(NASTY, NASTY)],
  )
  baseline = render(section([t._replace(text="x") for t in TOKENS]))
  reader = Reader(text)
  assert sum(tag == "script" for tag, _ in reader.elements) == 1
  allowed = {tag for tag, _ in Reader(baseline).elements}
  assert {tag for tag, _ in reader.elements} <= allowed | {"tr", "th", "td"}
  assert "alert('1')" not in text and "{{ title }} " in text
  assert not set(text) & {"\x00", "\x1b", "\u202e"}
  text.encode("utf-8")  # no half of a surrogate pair is left


def test_attributes_hold_nothing_but_what_the_page_wrote():
  safe = re.compile(r"[\w .%:;,='/-]*")
  for tag, attributes in Reader(render(section())).elements:
    for name, value in attributes.items():
      if tag != "meta":
        assert not name.startswith("on")
        assert safe.fullmatch(value or ""), (tag, name, value)


def test_the_page_asks_nothing_of_the_network():
  text = render(section())
  assert not re.search(r"(?i)https?:|//[a-z]|url\(|@import|src=|href=", text)
  assert "default-src 'none'" in text
  # Else the browser would refuse the page's own script.
  assert re.search(r"script-src 'sha256-[\w+/]{43}='", text)


def test_several_prompts_are_several_sections():
  reader = Reader(render(section(), section([], prompt="x" * 2000)))
  assert sum(tag == "section" for tag, _ in reader.elements) == 2
  assert reader.answers[1] == ""
  folds = [a for tag, a in reader.elements if tag == "details"]
  assert [("open" in fold) for fold in folds] == [True, False]
  identities = [a["id"] for _, a in reader.elements if "id" in a]
  assert len(set(identities)) == len(identities)


class Bytes:
  """A tokenizer whose ids are bytes; 0 says nothing."""

  tokens = tuple(f"<{i}>" for i in range(256))

  def decode(self, ids, skip_special=True):
    kept = bytes(i for i in ids if i or not skip_special)
    return kept.decode(errors="replace")


def answered(data, stops=(), tokenizer=True):
  answer = Answer(Bytes() if tokenizer else None, stops)
  n = len(data)
  log_probs = [-float(i) for i in range(n)]
  answer.push(NewTokens(data, [ACCEPTED] * n, log_probs, [NO_DRAFT] * n))
  answer.finish()
  return answer


def test_an_answer_keeps_a_token_whose_character_ends_later():
  answer = answered("é!".encode() + b"\x00\xe2\x82")
  assert [t.text for t in answer.tokens] == ["", "é", "!", "", "", "\ufffd"]
  assert [t.log_prob for t in answer.tokens] == [-0.0, -1, -2, -3, -4, -5]
  assert answer.text == "é!\ufffd"
  assert [t.id for t in answer.tokens] == answer.ids


@pytest.mark.parametrize("stop, kept", [("cd", "ab"), ("\ufffd", "abcd")])
def test_an_answers_tokens_end_where_a_stop_string_begins(stop, kept):
  answer = answered(b"abcd\xe2", (stop,))
  assert answer.stopped and answer.text == kept
  assert "".join(t.text for t in answer.tokens) == kept
  names = page.section(b"hi", answer, Bytes())
  assert names.prompt == "hi" and names.tokens == answer.tokens


def test_without_a_tokenizer_tokens_are_numbers():
  answer = answered(b"ab", tokenizer=False)
  assert [t.text for t in answer.tokens] == ["97 ", "98 "]
  assert answer.text == ""
  assert page.section([1, 2], answer, None).prompt == "1 2"
