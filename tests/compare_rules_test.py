"""The program compare_rules on a tiny model, and the shapes it compares."""

import dataclasses
import json

import pytest

import programs
from specdec import acceptance
from specdec.benchmark import comparison, runs, timing
from specdec.benchmark.decoder import batches_of
from specdec.benchmark.setup import Setup
from specdec.testing import enumeration

RANKS = {
  "without_replacement": [0.6, 0.2, 0.1],
  "deterministic": [0.3, 0.2, 0.1],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return programs.write_model(tmp_path_factory.mktemp("target"), num_layers=1)


@pytest.fixture
def compare(target, tmp_path):
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "abcabc"}\n{"prompt": "hello there"}\n')

  def call(*arguments):
    programs.run(
      "compare_rules",
      f"--target={target}",
      f"--drafter=model({target})",
      f"--prompt_file={prompts}",
      f"--output={tmp_path / 'out'}",
      "--max_new_tokens=8",
      "--temperature=1",
      "--sizes=2",
      *arguments,
    )
    return json.loads((tmp_path / "out" / "results.json").read_text())

  return call


def test_a_table_a_picture_and_a_tree_and_it_goes_on(
  compare, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(timing, "forget_programs", lambda: None)
  lossy = "lenience(share=0.25)"
  arguments = (f"--only=block; {lossy}",)
  with programs.waits() as waits:
    document = compare(*arguments)
  assert "counting expected tokens, chain of 2" in waits
  assert "compiling chain of 2, block" in waits
  out = tmp_path / "out"
  rules = [run["comparison"]["rule"] for run in document["runs"]]
  assert rules == ["block", lossy]
  [block, lenient] = document["runs"]
  assert block["nodes"] == 3
  # The draft is the target: everything is kept.
  assert block["expected"]["value"] == pytest.approx(2, abs=1e-4)
  assert block["acceptance"]["accepted_length"]["value"] == 2
  assert block["comparison"]["distance"] == 0
  assert lenient["comparison"]["distance"] > 0.1
  assert any("4 times as often" in text for text in document["caveats"])
  printed = capsys.readouterr().out
  assert "lossy, TV 0." in printed
  assert "warning: lossy: a token may come up to 4 times" in printed
  assert "best tree by the times of this run: " in printed
  assert (out / "table.txt").read_text().strip() in printed
  assert (out / "plot.png").stat().st_size > 10_000
  paths = json.loads((out / "tree.json").read_text())
  assert paths == document["tree"]["paths"]

  lines = (out / "lines.jsonl").read_text().splitlines()
  kept = [line for line in lines if '"lenience' not in line]
  passes = [line for line in kept if '"pass"' in line]
  kept.remove(passes[0])  # and was killed while passes were timed
  (out / "lines.jsonl").write_text("\n".join(kept) + '\n{"point": ["cut')
  again = compare(*arguments)
  assert again["runs"][0] == document["runs"][0]
  repeated, first = (d["runs"][1]["expected"] for d in (again, document))
  assert repeated == first


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--only=blocks"], "did you mean block"),
    (["--shapes=ring"], "--shapes: known: chain"),
    (["--sizes=0"], "must be >= 1"),
    (["--sizes=16"], "never fits into"),
    (["--only=kseq", "--shapes=dynamic tree"], "none of --only is right"),
    (["--only=greedy"], "greedy at temperature = 1 would not sample"),
    (["--drafter=lookup"], "lookup drafts chains.*take a drafter that can"),
  ],
)
def test_what_cannot_be_compared_is_refused(compare, arguments, sentence):
  with pytest.raises(SystemExit, match=sentence):
    compare(*arguments)


@pytest.mark.parametrize(
  "rates",
  [
    [0.6, 0.2, 0.1],
    [0.9],
    [0.15, 0.12, 0.1, 0.1, 0.09, 0.08, 0.07, 0.06],
    [0.3, 0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03],
  ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16, 64])
def test_all_shapes_of_a_size_have_that_many_draft_tokens(size, rates):
  setup = Setup(drafter="early_exit(1)", temperature=1.0)
  rules = ("rejection", "block", "kseq", "coupled", "typical(delta=0.2)")
  ranks = {kind: rates for kind in RANKS}
  shapes = comparison.shapes_of(setup, size, ranks, rules)
  names = {shape.name for shape in shapes}
  assert {"chain", "optimal tree", "dynamic tree"} <= names
  for shape in shapes:
    draft_shape = shape.setup(setup, "rejection").make_shape()
    spec = draft_shape.spec
    assert spec.max_nodes == size + 1
    assert spec.max_depth == shape.levels
    if shape.name == "chain":
      assert shape.rules == rules
      continue
    assert spec.siblings in (shape.siblings, "none")  # a chain
    assert draft_shape.num_run <= spec.max_nodes  # for early exit
    assert ("kseq" in shape.rules) == (spec.siblings in ("none", "iid"))
    assert "block" not in shape.rules
    assert {"rejection", "coupled", rules[-1]} <= set(shape.rules)


def test_a_tree_that_the_ranks_make_smaller_is_left_out():
  ranks = {kind: [0.0] for kind in RANKS}
  setup = Setup(drafter="early_exit(1)")
  shapes = comparison.shapes_of(setup, 4, ranks, comparison.RULES)
  assert {shape.name for shape in shapes} == {
    "chain", "2 chains", "4 chains", "dynamic tree",
  }  # fmt: skip


def test_a_drafter_of_chains_gets_no_trees():
  setup = Setup(drafter="lookup")
  shapes = comparison.shapes_of(setup, 4, RANKS, comparison.RULES)
  assert [shape.name for shape in shapes] == ["chain"]
  assert "kseq" not in shapes[0].rules  # what is copied was not drawn


def test_the_loss_on_tables_is_none_for_lossless_rules_and_at_temperature_0():
  for kind in ("none", "without_replacement", "deterministic"):
    loss = enumeration.tabular_loss(acceptance.rejection(), kind)
    assert loss < 1e-6
    assert enumeration.tabular_loss(acceptance.typical(), kind) > 0.05
    assert enumeration.tabular_loss(acceptance.typical(), kind, 0.0) < 1e-6
  half, whole = (
    enumeration.tabular_loss(acceptance.lenience(share), "none")
    for share in (0.5, 0.9)
  )
  assert half > whole > 0


def test_nothing_compiles_in_the_clock_after_programs_were_forgotten(target):
  sizes = {"prompt_size": 8, "max_new_tokens": 4}
  setup = Setup(str(target), drafter="lookup", **sizes)
  bench = comparison.Bench(setup.load_target(), [[1, 2, 3]])
  for k in (1, 2):
    decoders = bench.ways(dataclasses.replace(setup, k=k), bench.encoded, "")
    with timing.compilations() as late:
      runs.compare(decoders, batches_of(bench.encoded, 1))
    assert late.count == 0
    timing.forget_programs()
