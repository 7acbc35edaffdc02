"""scripts/compare_drafters.py as its users meet it, on a tiny model."""

import json

import _entrants
import compare_drafters
import pytest

import programs
from specdec.drafters.heads import size
from specdec.drafters.heads.head_config import HeadConfig

SHAPE = dict(width=8, mlp_width=12, num_heads=2, head_dim=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return programs.write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def compare(target, tmp_path):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "abcabc"}\n{"prompt": "hello there"}\n')

  def call(*arguments):
    programs.run(
      "compare_drafters",
      f"--target={target}",
      f"--prompt_file={prompts}",
      f"--output={tmp_path / 'out'}",
      "--max_new_tokens=8",
      "--k=1,2",
      "--tree_size=3",
      *arguments,
    )
    return json.loads((tmp_path / "out" / "results.json").read_text())

  return call


def test_a_table_and_a_picture_and_it_goes_on(
  compare, target, tmp_path, capsys
):
  path = tmp_path / "own.safetensors"
  net = programs.save_drafter(target, path, HeadConfig("prophet", **SHAPE))
  names = f"--drafters=model:{target},{path}"
  with programs.waits() as waits:
    document = compare(names)
  assert waits.count("compiling chain of 2, rejection") == 4
  points = [
    tuple(r["drafter"][x] for x in ("name", "temperature", "shape"))
    for r in document["runs"]
  ]
  shapes = ("chain", "chain", "tree")
  assert points == [
    (name, temperature, shape)
    for temperature in (0.0, 1.0)
    for name in (f"model:{target}", str(path))
    for shape in shapes
  ]
  twin, *_, own = document["runs"]
  # The draft is the target: everything is kept.
  assert twin["acceptance"]["accepted_length"]["value"] == 1
  assert own["drafter"]["weights"] == size.num_weights(net)
  rate, passes = document["read_rate"], dict(document["pass_seconds"])
  assert set(passes) == {1, 2, 3, 4}
  # By hand: rounds of one draft token.
  speed = twin["speed"]
  baseline = speed["baseline_seconds"] / speed["baseline_tokens"]
  seconds = passes[2] + max(0, baseline - passes[1])
  seconds += twin["drafter"]["step_bytes"] / rate
  expected = twin["acceptance"]["tokens_per_pass"]["value"] * baseline / seconds
  assert twin["predicted"] == pytest.approx(expected)
  printed = capsys.readouterr().out
  out = tmp_path / "out"
  assert (out / "table.txt").read_text().strip() in printed
  assert (out / "plot.png").stat().st_size > 10_000

  lines = (out / "lines.jsonl").read_text().splitlines()
  (out / "lines.jsonl").write_text("\n".join(lines[:-3]) + '\n{"point": ["cut')
  again = compare(names)
  kept, anew = (
    [run | {"predicted": 0} for run in d["runs"]] for d in (document, again)
  )
  assert kept == anew


def test_a_greedy_tree_draft_tokens_the_likeliest_tokens(monkeypatch):
  monkeypatch.setattr(compare_drafters, "FLAGS", Flags())
  candidate = _entrants.Candidate("x", "x", None, None, 0, 0.0, most_levels=2)
  kinds = {}
  for temperature in (0.0, 1.0):
    *chains, tree = compare_drafters.points(candidate, temperature, 2)
    assert [chain.size for chain in chains] == [1, 2]  # it has no third head
    kinds[temperature] = tree.expansion.spec.siblings
    assert tree.levels == 2
  # Without noise every later child would be "what is left", token 0, 1, ...
  assert kinds == {0.0: "deterministic", 1.0: "without_replacement"}


def test_layer_skip_ships():
  skip, _ = _entrants._read("skip", None)
  assert skip.attention == (1, 3, 4, 5) and skip.mlp == (1, 3)


class Flags:
  k, tree_size, acceptance, rank_acceptance = (1, 2, 3), 3, "rejection", ()


def test_heads_for_none_of_the_ks(monkeypatch):
  monkeypatch.setattr(compare_drafters, "FLAGS", Flags())
  candidate = _entrants.Candidate(
    "five", "x", None, None, 0, 0.0, most_levels=5
  )
  compare_drafters.check_candidates([candidate])
  monkeypatch.setattr(Flags, "k", (6, 8))
  with pytest.raises(ValueError, match="five has 5 heads"):
    compare_drafters.check_candidates([candidate])


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--temperature=1"], "--temperature is not for compare_drafters"),
    (["--k=0"], "--k"),
    (["--drafters=early_exit:9"], "exit_layer = 9"),
    (["--drafters=early_exit:one"], "early_exit:E"),
    (["--drafters=nowhere.safetensors"], "no such drafter"),
  ],
)
def test_what_cannot_be_compared_is_refused(compare, arguments, sentence):
  with pytest.raises(SystemExit, match=sentence):
    compare(*arguments)
