"""A run's folder: claimed by its settings, its lines never rewritten."""

import pytest

from specdec import run_folder


def test_claim_lists_what_differs(tmp_path):
  before = {"data": "a", "options": {"steps": 3, "log_every": 1}}
  run_folder.claim(tmp_path / "run", before, ("log_every",))
  run_folder.claim(tmp_path / "run", before, ("log_every",))
  now = {"data": "a", "options": {"steps": 4, "log_every": 2}}
  with pytest.raises(ValueError, match=r"\(options.steps: 3 -> 4\)"):
    run_folder.claim(tmp_path / "run", now, ("log_every",))
  # How a run is watched may change.
  now["options"]["steps"] = 3
  run_folder.claim(tmp_path / "run", now, ("log_every",))


def test_lines_survive_a_kill_in_the_middle_of_one(tmp_path):
  path = tmp_path / "lines.jsonl"
  lines = run_folder.Lines(path)
  lines.append({"a": 1})
  lines.append({"a": 2})
  whole = path.read_text()
  for cut in range(len(whole) + 1):
    path.write_text(whole[:cut])
    lines = run_folder.Lines(path)
    complete = [{"a": 1}, {"a": 2}][: len(lines.entries)]
    assert lines.entries == complete
    assert len(lines.broken) == (cut not in (0, 8, 9, 17, 18))
    lines.append({"a": 3})
    again = run_folder.Lines(path)
    assert again.entries == [*complete, {"a": 3}]
    assert path.read_text().startswith(whole[:cut])  # nothing was rewritten


def test_lines_that_are_no_object_are_named(tmp_path):
  path = tmp_path / "lines.jsonl"
  path.write_text('{"a": 1}\n[2]\n\n{"a":\n{"a": 4}\n')
  lines = run_folder.Lines(path)
  assert lines.entries == [{"a": 1}, {"a": 4}]
  assert [line.split(" of ")[0] for line in lines.broken] == [
    "line 2",
    "line 4",
  ]
