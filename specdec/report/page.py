"""Renders a generation as one HTML page: token origins, rounds, probabilities.

Invariant: all text from a model or a user passes `escape`, and the page makes
no network request (its content security policy forbids them).
"""

import base64
import hashlib
import importlib.resources
import math
import re
import string
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specdec.benchmark.results import Run
from specdec.benchmark.setup import Setup
from specdec.checkpoints import Tokenizer
from specdec.report.answer import Answer, Token
from specdec.types import ACCEPTED, BASELINE, BONUS, CORRECTION, NO_DRAFT
from specdec.utils import files, terminal
from specdec.utils.terminal import NAMES, is_unsafe

_CLASSES = {
  ACCEPTED: "accepted",
  CORRECTION: "correction",
  BONUS: "bonus",
  BASELINE: "baseline",
}
_MEANINGS = {
  ACCEPTED: "a draft token that was accepted",
  CORRECTION: "sampled from the target: a draft token was rejected",
  BONUS: "sampled from the target: all draft tokens were accepted",
  BASELINE: "sampled from the target: nothing was drafted",
}
_LONG_PROMPT = 1500  # characters; longer prompts are folded
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_ENTITIES["'"] = "&#x27;"


class Section(NamedTuple):
  """A prompt and its completion."""

  prompt: str
  prompt_tokens: int
  tokens: Sequence[Token]
  names: Sequence[str | None] = ()  # the vocabulary's text of each id


def section(
  prompt_ids: Sequence[int], answer: Answer, tokenizer: Tokenizer | None
) -> Section:
  """Returns the section of one row; the prompt includes special tokens."""
  if tokenizer is None:
    text, names = " ".join(map(str, prompt_ids)), ()
  else:
    text, names = tokenizer.decode(prompt_ids, False), tokenizer.tokens
  return Section(text, len(prompt_ids), answer.tokens, names)


def rounds(tokens: Iterable[Token]) -> list[list[Token]]:
  """Splits tokens into rounds: accepted tokens, then one from the target.

  The last round may lack the latter, cut off by EOS, the length limit or a stop
  string.
  """
  split: list[list[Token]] = []
  ended = True
  for token in tokens:
    if ended:
      split.append([])
    split[-1].append(token)
    ended = token.origin != ACCEPTED
  return split


def render(
  settings: Sequence[tuple[str, str]],
  headline: Sequence[tuple[str, str]],
  sections: Sequence[Section],
  summary: Sequence[tuple[str, str]],
) -> str:
  """Renders the page, a complete HTML document.

  Args:
    settings: (name, value); the value of 'target' goes into the title.
    headline: (name, value) of the numbers at the top.
    summary: (name, value) rows of the table at the end.
  """
  template = importlib.resources.files("specdec.report") / "page.html"
  source = template.read_text(encoding="utf-8")
  script = re.search("<script>(.*?)</script>", source, re.DOTALL)[1]
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  target = dict(settings).get("target", "a model")
  return string.Template(source).substitute(
    script_hash=f"sha256-{digest}",
    title=escape(f"{target} · where each token came from"),
    headline=_pairs(headline),
    settings=_pairs(settings),
    legend="".join(
      f'<li><b class="t {_CLASSES[origin]}">{name}</b> {_MEANINGS[origin]}</li>'
      for origin, name in NAMES.items()
    ),
    sections="\n".join(
      _section(number, section, len(sections) > 1)
      for number, section in enumerate(sections)
    ),
    summary="\n".join(
      f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
      for name, value in summary
    ),
  )


def write(
  path: str,
  setup: Setup,
  summary: Run,
  answers: Sequence[tuple[Sequence[int], Answer]],
  tokenizer: Tokenizer | None,
  rows: Sequence[tuple[str, str]],
) -> None:
  """Writes the page of one run.

  Args:
    answers: prompts (token ids) and answers.
    rows: of the table at the end.
  """
  settings = [
    ("target", setup.target),
    ("drafter", setup.description),
    ("rule", setup.acceptance),
    ("k", str(summary.k)),
  ]
  for name in ("temperature", "top_k", "top_p", "seed"):
    if (value := getattr(setup, name)) is not None:
      settings.append((name, f"{value:.12g}"))
  sections = [section(*pair, tokenizer) for pair in answers]
  text = render(settings, summary.headline(), sections, rows)
  files.replace_text(path, text)
  terminal.report(f"page: {path}", file=sys.stderr)


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
  return "".join(
    f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    for name, value in pairs
  )


def _section(number: int, section: Section, several: bool) -> str:
  """Renders a section; newlines in the answer are those of its text."""
  blocks, count = [], 0
  for n, block in enumerate(rounds(section.tokens), 1):
    spans = []
    for place, token in enumerate(block, 1):
      label = f"tip-{number}-{count}"
      where = f"round {n}, token {place} of {len(block)}"
      spans.append(_token(token, label, where, section.names))
      count += 1
    blocks.append(f'<span class="round">{"".join(spans)}</span>')
  prompt = escape(section.prompt, keep="\n\t")
  shown = " open" if len(section.prompt) < _LONG_PROMPT else ""
  answer = "".join(blocks) or '<span class="mark">no token</span>'
  return (
    f"<section><h2>{f'Prompt {number}' if several else 'The text'} "
    f"<small>{_count(count, 'token')} in {_count(len(blocks), 'round')}"
    f"</small></h2>\n<details{shown}><summary>Prompt, "
    f"{_count(section.prompt_tokens, 'token')}</summary>"
    f'<div class="prompt" dir="auto">{prompt}</div></details>\n'
    f'<div class="answer" dir="auto">{answer}</div></section>'
  )


def _count(number: int, thing: str) -> str:
  return f"{number} {thing}{'' if number == 1 else 's'}"


def _token(
  token: Token, label: str, where: str, names: Sequence[str | None]
) -> str:
  """Renders a token with its tooltip."""
  name = names[token.id] if token.id < len(names) else None
  quoted = f"“{escape(token.text)}”" if token.text else escape(name or "")
  silent = "" if token.text else " · no text of its own"
  kind = _CLASSES[token.origin]
  none = "" if _has_width(token.text) else " none"
  return (
    f'<span class="t {kind}{none}" tabindex="0" aria-describedby="{label}">'
    f"{_text(token.text)}"
    f'<span class="tip" id="{label}" role="tooltip" dir="ltr">'
    f'<span class="quoted">{quoted} </span>'
    f"<span>{NAMES[token.origin]} · id {token.id}{silent} </span>"
    f"<span>{where} </span>"
    f"{_bar('draft', token.draft_log_prob)}{_bar('target', token.log_prob)}"
    "</span></span>"
  )


def _bar(name: str, log_prob: float) -> str:
  """Renders a probability as number and bar; NO_DRAFT: nothing drafted."""
  value, width = "not drafted", 0.0
  if log_prob != NO_DRAFT:
    share = min(math.exp(log_prob), 1.0)  # rounding may exceed 1
    small = 0 < share < 0.001
    value, width = f"{share:.1e}" if small else f"{share:.3f}", 100 * share
  return (
    f'<span class="p"><span>{name}</span><span class="bar">'
    f'<i style="width:{width:.1f}%"></i></span> '
    f'<span class="value">{value}</span> </span>'
  )


def _text(text: str) -> str:
  """Escapes text and marks newlines and tabs visibly."""
  escaped = escape(text, keep="\n\t")
  for character, sign in (("\n", "↵"), ("\t", "⇥")):
    sign = f'<span class="mark" aria-hidden="true">{sign}</span>'
    escaped = escaped.replace(character, sign + character)
  return escaped


def escape(text: str, keep: str = "") -> str:
  """Escapes text for HTML and quoted attributes.

  Spells out characters that are invisible or unsafe (control characters,
  directional overrides, lone surrogates), except those in `keep`.
  """
  return "".join(
    character if character in keep else _spelled(character)
    for character in text
  )


def _spelled(character: str) -> str:
  if character in _ENTITIES:
    return _ENTITIES[character]
  code = ord(character)
  if character == "\n":
    return "↵"
  if code < 0x20 or code == 0x7F:
    return chr(0x2421 if code == 0x7F else 0x2400 + code)
  return f"[U+{code:04X}]" if is_unsafe(character) else character


def _has_width(text: str) -> bool:
  """Whether the text has a visible character to hover over."""
  return any(
    is_unsafe(character) or unicodedata.category(character) not in ("Cf", "Mn")
    for character in text
  )
