"""prepare_data: prompts of every source, evenly spread, and refusals."""

import json

import programs


def test_prompts_are_spread_over_every_source(tmp_path):
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
  programs.run(
    "prepare_data",
    "--make=prompts",
    f"--questions={tmp_path / 'q.jsonl'}",
    f"--passages={tmp_path / 'p.txt'}",
    f"--code={code}",
    "--count=5",
    "--every=11",
    f"--output={out}",
  )

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
