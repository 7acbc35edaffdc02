"""Renders a generation as a HTML page: token origins, rounds, probabilities."""

import math
import sys
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from specdec.benchmark.results import Run
from specdec.benchmark.setup import Setup
from specdec.checkpoints import Tokenizer
from specdec.report import html, round_picture
from specdec.report.answer import Answer, Token, rounds_of
from specdec.report.round_picture import Drawing
from specdec.types import ACCEPTED, BASELINE, BONUS, CORRECTION, NO_DRAFT
from specdec.utils import files, terminal

_SAMPLED = "sampled from the target:"
_ORIGINS = {  # class in the page, meaning
  ACCEPTED: ("accepted", "a draft token that was accepted"),
  CORRECTION: ("correction", f"{_SAMPLED} a draft token was rejected"),
  BONUS: ("bonus", f"{_SAMPLED} all draft tokens were accepted"),
  BASELINE: ("baseline", f"{_SAMPLED} nothing was drafted"),
}


class Section(NamedTuple):
  """A prompt and its completion."""

  prompt: str
  prompt_tokens: int
  tokens: Sequence[Token]
  names: Sequence[str | None] = ()  # the vocabulary's text of each id
  drawings: Sequence[Drawing] = ()  # of its rounds, where they are known


def section(
  prompt_ids: Sequence[int], answer: Answer, tokenizer: Tokenizer | None
) -> Section:
  """Returns the section of one row; the prompt includes special tokens."""
  if tokenizer is None:
    text, names = " ".join(map(str, prompt_ids)), ()
  else:
    text, names = tokenizer.decode(prompt_ids, False), tokenizer.tokens
  drawings = round_picture.draw_all(
    answer.rounds, rounds_of(answer.tokens), round_picture.spelling(tokenizer)
  )
  return Section(text, len(prompt_ids), answer.tokens, names, drawings)


def render(
  settings: Sequence[tuple[str, str]],
  headline: Sequence[tuple[str, str]],
  sections: Sequence[Section],
  summary: Sequence[tuple[str, str]],
) -> str:
  """Renders the page, a complete HTML document: settings, of which the target
  goes into the title, numbers at the top, texts, and a table at the end."""
  return html.render(
    "page.html",
    target=dict(settings).get("target", "a model"),
    settings=settings,
    headline=headline,
    sections=sections,
    summary=summary,
    origins=_ORIGINS,
    origin_names=terminal.NAMES,
    rounds=rounds_of,
    marked=_marked,
    has_width=_has_width,
    share=_share,
    sizes=round_picture.SIZES,
  )


def write(
  path: str,
  setup: Setup,
  summary: Run,
  answers: Sequence[tuple[Sequence[int], Answer]],
  tokenizer: Tokenizer | None,
  rows: Sequence[tuple[str, str]],
) -> None:
  """Writes the page of one run: prompts (token ids) and answers, and the rows
  of a table."""
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


def _share(log_prob: float) -> tuple[str, float]:
  """Returns a probability as text and in percent; NO_DRAFT: nothing drafted."""
  if log_prob == NO_DRAFT:
    return "not drafted", 0.0
  share = min(math.exp(log_prob), 1.0)  # rounding may exceed 1
  return f"{share:.1e}" if 0 < share < 0.001 else f"{share:.3f}", 100 * share


def _marked(text: str) -> Markup:
  """Escapes text and marks newlines and tabs visibly."""
  escaped = html.escape(text)
  for character, sign in (("\n", "↵"), ("\t", "⇥")):
    mark = Markup(f'<span class="mark" aria-hidden="true">{sign}</span>')
    escaped = escaped.replace(character, mark + character)
  return escaped


def _has_width(text: str) -> bool:
  """Whether the text has a visible character to hover over."""
  return any(
    terminal.is_unsafe(x) or unicodedata.category(x) not in ("Cf", "Mn")
    for x in text
  )
