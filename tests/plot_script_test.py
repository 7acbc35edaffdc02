"""plot draws what bench and eval wrote, and refuses the rest."""

import json

import pytest

import programs


def document(ks=(1, 2), target="a-model"):
  def run(group, k):
    estimate = {"value": 1 + 0.2 * k, "error": 0.1}
    return {
      "group": group,
      "k": k,
      "batch": 1,
      "acceptance": {"tokens_per_pass": estimate},
      "speed": {"speedup": estimate},
    }

  return {
    "format": "specdec/1",
    "settings": {
      "target": target,
      "acceptance": "coupled",
      "temperature": 0.0,
      "dtype": "float32",
      "context": 8,
    },
    "machine": {"device": "a machine"},
    "caveats": [],
    "runs": [run(group, k) for group in ("qa", "all") for k in ks],
  }


@pytest.fixture
def plot(tmp_path, monkeypatch):
  def call(*arguments):
    monkeypatch.chdir(tmp_path)
    programs.run("plot", "--picture=out.svg", *arguments)
    return (tmp_path / "out.svg").read_text()

  return call


def test_draws_groups_of_one_and_curves_of_several(plot, tmp_path):
  (tmp_path / "a=1.json").write_text(json.dumps(document()))
  (tmp_path / "b.json").write_text(json.dumps(document(target="other")))
  assert "<svg" in plot("a=1.json")
  assert "<svg" in plot("first=a=1.json", "second=b.json")


@pytest.mark.parametrize(
  ("content", "sentence"),
  [
    ("{", "is not JSON"),
    ("[1]", "is none of this repository's results"),
    ('{"a": 1}', "is none of this repository's results"),
    (
      json.dumps(document() | {"runs": document()["runs"][:2]}),
      "has no group 'all'; ",
    ),
  ],
)
def test_anything_else_is_refused(plot, tmp_path, content, sentence):
  (tmp_path / "x.json").write_text(content)
  with pytest.raises(SystemExit, match=sentence):
    plot("label=x.json")


def test_a_group_of_one_file_is_refused(plot, tmp_path):
  (tmp_path / "a.json").write_text(json.dumps(document()))
  with pytest.raises(SystemExit, match="--group is for several files"):
    plot("--group=qa", "a.json")
  assert "<svg" in plot("--group=qa", "x=a.json")


def test_nothing_to_draw(plot):
  with pytest.raises(SystemExit, match="one or more files"):
    plot()
