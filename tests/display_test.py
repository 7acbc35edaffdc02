"""What a model, a file or a user wrote is not obeyed by the terminal."""

import ast
import io
import json

import pytest

import programs
from specdec.cli import app
from specdec.report import html, tables
from specdec.types import ACCEPTED
from specdec.utils import terminal

# It writes to the clipboard (OSC 52), clears the screen, turns the line around.
NASTY = "\x1b]52;c;aGk=\x07\x9b2J\r\x00\x7f\u202e"
SHOWN = r"\x1b]52;c;aGk=\x07\x9b2J\r\x00\x7f\u202e"
PRINTING = ("print", "sys.stdout.write", "sys.stderr.write")


def assert_harmless(text):
  left = set(text) & set(NASTY) - set(SHOWN)
  assert not left, ascii(text)


def test_what_is_obeyed_or_not_seen_is_spelled_out():
  for code in [*range(0x100), *range(0x2010, 0x2070), 0xD800, 0xDFFF]:
    control = code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code <= 0xDFFF
    unseen = code in (0xAD, 0x200E, 0x200F) or 0x2028 <= code <= 0x202E
    unseen |= 0x2060 <= code <= 0x2064 or 0x2066 <= code <= 0x206F
    same = terminal.escape(chr(code)) == chr(code)
    assert same == (chr(code) in "\n\t" or not (control or unseen)), hex(code)
  for code in (0x61C, 0x200B, 0xFEFF, 0xE000, *range(0xE0020, 0xE0080)):
    assert terminal.escape(chr(code)).isascii(), hex(code)
    assert html.spell(chr(code)) == f"[U+{code:04X}]"
  for text in ("\U0001f468\u200d\U0001f469", "\u0645\u06cc\u200c\u062e"):
    assert terminal.escape(text) == text == html.spell(text)
  assert terminal.escape(f"a\n{NASTY}\tb") == f"a\n{SHOWN}\tb"
  terminal.escape("\ud800").encode()  # any terminal can write it


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_token_is_escaped_within_its_colour(mode):
  painter = terminal.Painter(mode, io.StringIO())
  painted = painter.paint(NASTY, ACCEPTED)
  assert SHOWN in painted
  assert_harmless(painted.replace("\x1b[38;5;33m", "").replace("\x1b[0m", ""))
  assert SHOWN in painter.dim(NASTY)


def test_tables_stay_tables():
  text = terminal.columns(["group", "k"], [[NASTY, "1"], ["a\nb", "22"]])
  assert_harmless(text)
  assert len(text.split("\n")) == 3
  assert len({len(line) for line in text.split("\n")}) == 1
  assert_harmless(terminal.table([(NASTY, NASTY)]))


@pytest.mark.parametrize("arguments", [[], [f"--{NASTY}"]])
def test_an_error_s_sentence_is_escaped(arguments):
  def work(options):
    raise ValueError(f"no model {NASTY}")

  with pytest.raises(SystemExit) as raised:
    app.Program("", lambda flags: None, work)(["program", *arguments])
  assert r"\x1b]52;c;aGk" in raised.value.code
  assert_harmless(raised.value.code)


def test_a_traceback_is_escaped(capsys):
  error = RuntimeError(NASTY)
  app._excepthook(type(error), error, None)
  assert capsys.readouterr().err == f"RuntimeError: {SHOWN}\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  letters = ["a", NASTY, "\x1b[5m"]
  return programs.write_model(tmp_path_factory.mktemp("m"), letters=letters)


def prompts(folder, *more):
  """A file of a bad name, with a prompt of a bad category and a bad line."""
  path = folder / f"{NASTY[:-2].replace(chr(0), '')}.jsonl"
  lines = [{"prompt": "aaaaaaaaa", "category": NASTY}, {}, *more]
  path.write_text("\n".join(map(json.dumps, lines)))
  return path


def test_generate_prints_tokens_and_file_names_escaped(
  target, tmp_path, capsys
):
  page = tmp_path / "b\x1b]0;pwn\x07.html"
  programs.run(
    "generate", f"--target={target}", f"--prompt_file={prompts(tmp_path)}",
    "--max_new_tokens=24", "--color=never", "--temperature=2", "--k=1",
    "--repeats=1", f"--html={page}",
  )  # fmt: skip
  printed = capsys.readouterr()
  assert r"\x1b[5m" in printed.out and SHOWN in printed.out
  assert r"\x1b]52;c;aGk=" in printed.err and "has none of" in printed.err
  assert_harmless(printed.out + printed.err.replace("\r", ""))
  assert_harmless(page.read_text().replace("\r", ""))


def test_eval_prints_and_writes_categories_escaped(target, tmp_path, capsys):
  path = prompts(tmp_path, {"prompt": ""})
  programs.run(
    "eval", f"--target={target}", f"--prompt_file={path}", "--k=1",
    "--max_new_tokens=8", f"--output={tmp_path / 'run'}",
  )  # fmt: skip
  printed = capsys.readouterr()
  assert SHOWN in printed.out and "skipped" in printed.err
  assert_harmless(printed.out + printed.err.replace("\r", ""))
  assert_harmless((tmp_path / "run" / "table.txt").read_text())


def test_programs_print_by_report_or_a_painter():
  root = programs.SCRIPTS.parent
  files = [*programs.SCRIPTS.glob("*.py"), *(root / "specdec").rglob("*.py")]
  # Of escaped text, help pages and JSON.
  escaping = {
    "terminal.py", "app.py", "console.py", "chat_template.py",
    "round_picture.py",
  }  # fmt: skip
  raw = [
    f"{file.name}: {ast.unparse(call)}"
    for file in files
    if file.name not in escaping
    for call in ast.walk(ast.parse(file.read_text()))
    if isinstance(call, ast.Call) and ast.unparse(call.func) in PRINTING
    if call.args and not ast.unparse(call.args[0]).startswith("painter.")
  ]
  assert raw == []


@pytest.mark.parametrize("distance, is_wrong", [(1e-6, False), (0.1, True)])
def test_a_rule_that_only_calls_itself_lossless_is_named(distance, is_wrong):
  comparison = dict(rule="half", lossless=True, distance=distance)
  text = tables.of_rules(
    [{"comparison": comparison}],
    {},
    None,
    [],
    lambda runs, columns: columns["distribution"](runs[0]),
  )
  assert ("NOT exact, TV 0.100" in text) == is_wrong
  assert ("warning: half calls itself lossless" in text) == is_wrong
