"""The flags of how a text is shown: coloured, round by round, as a page."""

import sys
from collections.abc import Sequence

from specdec.benchmark.results import Run
from specdec.benchmark.setup import Setup
from specdec.checkpoints import Tokenizer
from specdec.cli import app
from specdec.report import page, round_picture
from specdec.report.answer import Answer
from specdec.utils import terminal
from specdec.utils.terminal import Painter


def define(flags: app.Flags) -> None:
  flags.enum(
    "color", "auto", ("auto", "always", "never"), "Colour tokens by origin."
  )
  flags.bool(
    "watch",
    False,
    "Print the first text's rounds one by one: ✓ accepted, ✗ refused, + the "
    "target's own token.",
  )
  flags.string(
    "html",
    None,
    "Write a page here, one file for any browser and no network: the text by "
    "origin and round, each round's draft as a tree, each token's draft and "
    "target probability, and the table.",
  )
  flags.string(
    "svg", None, "Write a picture of the first rounds of the first text here."
  )
  flags.string(
    "profile", None, "Folder for a trace of one decoding each way, for XProf."
  )


def check(options: app.Options) -> None:
  app.check_writable("--html", options.html)
  app.check_writable("--svg", options.svg)
  places = [x for x in (options.json, options.html, options.svg) if x]
  if len(places) > len({*places}):
    raise ValueError(
      f"--json, --html and --svg would write over each other: {places[-1]}"
    )
  if options.profile:
    app.check_folder("--profile", options.profile)
  if options.mesh and (options.watch or options.svg):
    raise ValueError("--watch and --svg are of one device; leave --mesh out")


def streaming(options: app.Options, tokenizer: Tokenizer | None) -> dict:
  """Returns what `answer.stream_answers` is to know of the flags."""
  painter = Painter(options.color, sys.stdout)
  watch = round_picture.watcher(tokenizer, painter) if options.watch else None
  traced = bool(options.html or options.svg) and not options.mesh
  return dict(painter=painter, traced=traced, watch=watch)


def write(
  options: app.Options,
  setup: Setup,
  summary: Run,
  encoded: Sequence[Sequence[int]],
  answers: Sequence[Answer],
  tokenizer: Tokenizer | None,
  table: Sequence[tuple[str, str]],
) -> None:
  """Writes what --html and --svg ask for."""
  if options.html:
    pairs = [*zip(encoded, answers)]
    page.write(options.html, setup, summary, pairs, tokenizer, table)
  if options.svg:
    round_picture.write(options.svg, setup, answers[0], tokenizer)
    terminal.report(f"picture: {options.svg}", file=sys.stderr)
