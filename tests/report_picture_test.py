"""report --picture draws what bench and eval wrote, and refuses the rest."""

import json

import pytest

import programs
from documents import run


def document(target="a-model"):
  settings = {"target": target, "acceptance": "coupled", "temperature": 0.0}
  return {
    "format": "specdec/1",
    "settings": settings,
    "machine": {"device": "a machine"},
    "caveats": [],
    "runs": [run(group, k) for group in ("qa", "all") for k in (1, 2)],
  }


@pytest.fixture
def plot(tmp_path, monkeypatch):
  def call(*arguments):
    monkeypatch.chdir(tmp_path)
    programs.run("report", "--picture=out.svg", *arguments)
    return (tmp_path / "out.svg").read_text()

  return call


def test_draws_groups_of_one_and_curves_of_several(plot, tmp_path):
  (tmp_path / "a=1.json").write_text(json.dumps(document()))
  (tmp_path / "b.json").write_text(json.dumps(document("other")))
  assert "<svg" in plot("a=1.json")
  assert "<svg" in plot("first=a=1.json", "second=b.json")
  assert "<svg" in plot("--group=qa", "x=b.json")
  with pytest.raises(SystemExit, match="--group is for several files"):
    plot("--group=qa", "b.json")
  with pytest.raises(SystemExit, match="one or more files"):
    plot()
  with pytest.raises(SystemExit, match="two files have one label"):
    plot("x=b.json", "x=b.json")


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    ("{", "is not JSON"),
    ("[1]", "is none of this repository's results"),
    ('{"a": 1}', "is none of this repository's results"),
    (json.dumps(document()), "has no group 'code'; "),
    ('{"format": "specdec/1"}', "label holds no runs to plot"),
  ],
)
def test_anything_else_is_refused(plot, tmp_path, content, sentence):
  (tmp_path / "x.json").write_text(content)
  with pytest.raises(SystemExit, match=sentence):
    plot("--group=code", "label=x.json")
