"""scripts/training_prompts.py: some of every source, evenly spread."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "training_prompts.py"


def run(*arguments):
  """In a process of its own: it shares no flags with the other programs."""
  return subprocess.run(
    [sys.executable, SCRIPT, *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


def test_of_every_source_some(tmp_path):
  (tmp_path / "q.jsonl").write_text(
    "".join(json.dumps({"question": f"{i}?"}) + "\n" for i in range(10))
  )
  lines = [letter * 400 for letter in "abcdef"]
  (tmp_path / "p.txt").write_text("short\n\n".join(x + "\n" for x in lines))
  code = tmp_path / "code"
  code.mkdir()
  body = '  """Says."""\n  a = x\n  b = a\n  c = b\n  return c\n'
  (code / "m.py").write_text(
    f"def f(x):\n{body}\ndef g():\n  pass\n\ndef h(x):\n{body}"
  )
  (code / "broken.py").write_text("def (")
  out = tmp_path / "out"
  done = run(
    f"--questions={tmp_path / 'q.jsonl'}",
    f"--passages={tmp_path / 'p.txt'}",
    f"--code={code}",
    "--count=5",
    "--every=11",
    f"--output={out}",
  )
  assert done.returncode == 0, done.stderr

  def read(name):
    lines = (out / f"{name}.jsonl").read_text().splitlines()
    by = {}
    for line in map(json.loads, lines):
      by.setdefault(line["category"], []).append(line["prompt"])
    return by

  by = read("prompts")
  [bare] = by.pop("code")
  assert bare == 'def h(x):\n  """Says."""'
  assert set(by) == {"questions", "passages"}
  assert by["questions"] == ["0?", "2?", "4?", "6?", "8?"]
  assert len(by["passages"]) == 5 and "Summarize" in by["passages"][0]
  [head] = read("held_out")["code"]  # the eleventh
  assert head.startswith("Complete")
  assert head.endswith('\n\ndef f(x):\n  """Says."""')


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    ([], "give --questions"),
    (["--count=0"], "--count=0"),
    (["--questions=nowhere.jsonl"], "nowhere.jsonl"),
  ],
)
def test_refusals(tmp_path, arguments, sentence):
  done = run(f"--output={tmp_path / 'out'}", *arguments)
  assert done.returncode and sentence in done.stderr
  assert "Traceback" not in done.stderr
