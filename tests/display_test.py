"""What a model, a file or a user wrote is not obeyed by the terminal."""

import ast
import io
import json
import subprocess
import sys

import pytest

import programs
from specdec.cli import app
from specdec.report import html
from specdec.types import ACCEPTED
from specdec.utils import terminal

# It writes to the clipboard (OSC 52), clears the screen, turns the line around.
NASTY = "\x1b]52;c;aGk=\x07\x9b2J\r\x00\x7f\u202e"
SHOWN = r"\x1b]52;c;aGk=\x07\x9b2J\r\x00\x7f\u202e"


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


def test_an_error_s_sentence_is_escaped():
  def work(options):
    raise ValueError(f"no model {NASTY}")

  with pytest.raises(SystemExit) as raised:
    app.Program("", lambda flags: None, work)(["program"])
  assert raised.value.code == f"program: no model {SHOWN}"


def test_a_flag_that_is_none_is_escaped():
  found = subprocess.run(
    [sys.executable, programs.SCRIPTS / "report.py", "--a\x1b]0;pwn\x07"],
    capture_output=True,
    text=True,
  )
  assert found.returncode == 1
  assert r"Unknown command line flag 'a\x1b]0;pwn\x07'" in found.stderr


def test_a_traceback_is_escaped(capsys):
  error = RuntimeError(NASTY)
  app._excepthook(type(error), error, None)
  assert capsys.readouterr().err == f"RuntimeError: {SHOWN}\n"


def test_tokens_reach_standard_output_escaped(tmp_path, capsys):
  target = programs.write_model(tmp_path, letters=["a", NASTY, "\x1b[5m"])
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text(json.dumps({"prompt": "aaa"}) + "\n")
  programs.run(
    "generate", f"--target={target}", f"--prompt_file={prompts}",
    "--max_new_tokens=24", "--color=never", "--temperature=2",
    f"--html={tmp_path / 'page.html'}",
  )  # fmt: skip
  said = capsys.readouterr()
  assert r"\x1b[5m" in said.out and SHOWN in said.out
  assert_harmless(said.out + said.err.replace("\r", ""))
  assert_harmless((tmp_path / "page.html").read_text().replace("\r", ""))


def test_programs_print_by_report_or_a_painter():
  root = programs.SCRIPTS.parent
  files = [*programs.SCRIPTS.glob("*.py"), *(root / "specdec").rglob("*.py")]
  # Of escaped text, help pages and JSON.
  own = {"terminal.py", "app.py", "console.py", "chat_template.py"}
  raw = [
    f"{file.name}: {ast.unparse(call)}"
    for file in files
    if file.name not in own
    for call in ast.walk(ast.parse(file.read_text()))
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "print"
    if call.args and not ast.unparse(call.args[0]).startswith("painter.")
  ]
  assert raw == []


@pytest.mark.parametrize("name", ["bench", "generate"])
def test_names_of_prompt_files_are_escaped(tmp_path, capsys, monkeypatch, name):
  programs.fake_machine(monkeypatch)
  target = programs.write_model(tmp_path / "target")
  prompts = tmp_path / "a\x1b]0;pwn\x07.jsonl"
  prompts.write_text('{"prompt": "aaaaaaaaa"}\n{}\n')
  page = tmp_path / "b\x1b]0;pwn\x07.html"
  flags = {"bench": ["--context=8"], "generate": [f"--html={page}"]}
  programs.run(
    name, f"--target={target}", f"--prompt_file={prompts}", "--k=1",
    "--max_new_tokens=8", "--repeats=1", *flags[name],
  )  # fmt: skip
  said = capsys.readouterr()
  assert r"a\x1b]0;pwn\x07.jsonl has none of" in said.err
  assert not {"\x1b", "\x07"} & set(said.out + said.err)


def test_categories_and_names_of_prompts_are_escaped(tmp_path, capsys):
  target = programs.write_model(tmp_path / "target")
  prompts = tmp_path / f"{NASTY[:-2].replace(chr(0), '')}.jsonl"
  lines = [{"prompt": "aaa", "category": NASTY}, {"prompt": ""}]
  prompts.write_text("\n".join(map(json.dumps, lines)))
  programs.run(
    "eval", f"--target={target}", f"--prompt_file={prompts}", "--k=1",
    "--max_new_tokens=8", f"--output={tmp_path / 'run'}",
  )  # fmt: skip
  said = capsys.readouterr()
  assert SHOWN in said.out and "skipped" in said.err
  assert_harmless(said.out)
  skipped = said.err[said.err.index("skipped") :].split("\n")[0]
  assert_harmless(skipped)
  assert_harmless((tmp_path / "run" / "table.txt").read_text())
