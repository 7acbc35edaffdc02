"""What is compared of rules, shapes and drafters, predicted and refused."""

import dataclasses
import json

import numpy as np
import pytest

import programs
from specdec import acceptance
from specdec.benchmark import comparison, drafter_comparison, runs, timing
from specdec.benchmark.batches import batches_of
from specdec.benchmark.setup import Setup
from specdec.cli import compare_rules
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import presets
from specdec.report import result_tables
from specdec.roofline import drafter_cost
from specdec.roofline.cost import pass_bound
from specdec.testing import tabular
from specdec.types import NO_COST, DrafterCost, Skip
from specdec.utils import files

RANKS = {
  "without_replacement": [0.6, 0.2, 0.1],
  "deterministic": [0.3, 0.2, 0.1],
}


MINE = """
from specdec import acceptance, drafters

def copies(shape):
  return drafters.lookup(shape=shape)

def mine():
  return acceptance.rejection()
"""


def until(monkeypatch, program, flags, name):
  """Runs a comparison up to a function of `comparison`; its arguments, or what
  the program ended with before."""
  seen = []

  def stop(*args):
    seen.append(args)
    raise ValueError("far enough")

  with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
    patch.setattr(comparison, name, stop)
    programs.run(program, *flags)
  return seen[0] if seen else ended.value.code


@pytest.fixture
def mine(target, tmp_path):
  """A drafter and a rule of one's own, and flags to compare them."""
  file, prompts = tmp_path / "mine.py", tmp_path / "prompts.jsonl"
  file.write_text(MINE)
  prompts.write_text('{"prompt": "abcabc"}\n')
  flags = [f"--prompt_file={prompts}", f"--output={tmp_path / 'out'}"]
  return file, [f"--target={target}", "--max_new_tokens=8", *flags]


def test_a_drafter_that_was_edited_is_measured_anew(monkeypatch, mine):
  file, flags = mine
  flags += [f"--drafters={file}:copies; early_exit(1)", "--k=1"]
  flags += ["--tree_size=0"]
  keys = []
  for text in (MINE, MINE + "# edited\n", MINE):
    file.write_text(text)
    _, points, *_ = until(monkeypatch, "compare_drafters", flags, "resume")
    keys.append({*points})
  before, edited, again = keys
  assert {name for name, *_ in before & edited} == {"early_exit(1)"}
  assert {name for name, *_ in before - edited} == {f"{file}:copies"}
  assert again == before


def test_a_rule_that_was_edited_is_not_mixed_with_the_one_before(
  monkeypatch, mine
):
  file, flags = mine
  flags += ["--drafter=early_exit(1)", "--sizes=2", "--temperature=1"]
  flags += [f"--only=rejection; {file}:mine"]
  for text, ended in ((MINE, False), (MINE, False), (MINE + "# edited", True)):
    file.write_text(text)
    result = until(monkeypatch, "compare_rules", flags, "measure_acceptance")
    assert isinstance(result, str) == ended
  assert "other settings (file_checksums" in result


SURE, EVEN = [0.9], [0.15, 0.12, 0.1, 0.1, 0.09, 0.08, 0.07, 0.06]
RATES = SURE, EVEN, [0.6, 0.2, 0.1], [0.3, 0.15, 0.1, 0.08, 0.06, 0.05, 0.04]
DUE = [(1, 0), (2, 1), (3, 3), (4, 0), (8, 2), (64, 3)]


@pytest.mark.parametrize(
  "size, rates",
  [
    pytest.param(
      size,
      rates,
      marks=[] if (size, number) in DUE else pytest.mark.slow,
    )
    for size in (1, 2, 3, 4, 8, 16, 64)
    for number, rates in enumerate(RATES)
  ],
)
def test_all_shapes_of_a_size_have_that_many_draft_tokens(size, rates):
  setup = Setup(drafter="early_exit(1)", temperature=1.0)
  rules = ("rejection", "block", "kseq", "coupled", "typical(delta=0.2)")
  ranks = {kind: rates for kind in RANKS}
  shapes = comparison.shapes_of(setup, size, ranks, rules)
  names = {shape.name for shape in shapes}
  assert {"chain", "optimal tree", "dynamic tree"} <= names
  assert ("wide tree" in names) == (size <= 3)  # early exit has no more room
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
    drawn = shape.drawn(setup)
    for rule in shape.rules:  # right for what is drawn, thus exact
      value = comparison.rule_of(setup, rule)
      distance = tabular.on_tables(value, drawn).distance
      assert distance < 1e-6 or not value.lossless or rule == "coupled"


def test_a_wide_tree_is_bounded_by_its_size_alone():
  shapes = comparison.shapes_of(Setup(temperature=1.0), 7, RANKS, ["coupled"])
  [wide] = (shape for shape in shapes if shape.name == "wide tree")
  assert wide.levels == 7
  # Of one certain token a level: a chain; of equal first tokens: all of them.
  assert wide.call == "dynamic(7, top=7)"


def test_trees_that_ranks_make_smaller_or_drafters_cannot_draw_are_left_out():
  ranks = {kind: [0.0] for kind in RANKS}
  setup = Setup(drafter="early_exit(1)")
  shapes = comparison.shapes_of(setup, 4, ranks, comparison.RULES)
  assert {shape.name for shape in shapes} == {
    "chain", "2 chains", "4 chains", "dynamic tree",
  }  # fmt: skip
  setup = Setup(drafter="lookup")
  [chain] = comparison.shapes_of(setup, 4, RANKS, comparison.RULES)
  assert chain.name == "chain"
  assert "kseq" not in chain.rules  # what is copied was not drawn


def test_the_loss_on_tables_is_none_for_lossless_rules_and_at_temperature_0():
  for kind in ("none", "without_replacement", "deterministic"):
    strict = tabular.on_tables(acceptance.rejection(), kind)
    assert strict.distance < 1e-6
    assert strict.accepted <= strict.optimum + 1e-6
    assert tabular.on_tables(acceptance.typical(), kind).distance > 0.05
    greedy = tabular.on_tables(acceptance.typical(), kind, 0.0)
    assert greedy.distance < 1e-6
  half, whole = (
    tabular.on_tables(acceptance.lenience(share), "none").distance
    for share in (0.5, 0.9)
  )
  assert half > whole > 0


def test_no_lossless_rule_exceeds_the_optimum_on_the_tables():
  best = tabular.on_tables(acceptance.block(), "none")
  assert best.accepted == pytest.approx(best.optimum, abs=1e-6)
  for kind in ("none", "iid", "without_replacement", "deterministic"):
    strict, leaves_first, coupled = (
      tabular.on_tables(rule, kind)
      for rule in (
        acceptance.rejection(),
        acceptance.traversal(),
        acceptance.coupled(),
      )
    )
    assert strict.accepted <= leaves_first.accepted + 1e-6
    assert leaves_first.accepted <= leaves_first.optimum + 1e-6
    if kind in ("none", "deterministic"):  # else it does not know
      assert coupled.accepted <= coupled.optimum + 1e-6
    else:
      assert np.isnan(coupled.accepted)
      assert strict.accepted < leaves_first.accepted - 0.01
  # Of point masses no rule is better than another.
  assert strict.accepted == pytest.approx(strict.optimum, abs=1e-6)
  kseq, leaves_first, multipath = (
    tabular.on_tables(rule, "iid")
    for rule in (
      acceptance.kseq(),
      acceptance.traversal(),
      acceptance.multipath(),
    )
  )
  assert kseq.accepted < leaves_first.accepted < multipath.accepted
  assert multipath.accepted <= multipath.optimum + 1e-6


def test_lossy_rules_at_equal_length(monkeypatch, tmp_path, capsys):
  """Rules that keep whatever is likely lose more than those of a ratio."""
  monkeypatch.setattr(tabular, "_HALVINGS", 3)
  monkeypatch.setattr(tabular, "GAINS", (1.5, 9.0))
  compare_rules.main(["compare_rules", "--tables", f"--output={tmp_path}"])
  document = json.loads((tmp_path / "results.json").read_text())
  rows = [tabular.Equal(**row) for row in document["equal_length"]]
  rows = {(row.gain, row.rule.split("(")[0]): row for row in rows}
  strict = rows[1.0, "rejection"]
  names = ("lenience", "fly", "typical", "relaxed")
  for name in names:
    row = rows[1.5, name]
    assert row.accepted == pytest.approx(1.5 * strict.accepted, abs=1e-6)
    assert row.distance > 0.1 and row.divergence > row.distance**2
  ours = [rows[1.5, name].distance for name in names]
  assert max(ours[:2]) < min(ours[2:])
  # No chain of three has nine times as many tokens.
  assert sum(row.accepted is None for row in rows.values()) == len(names)
  for text in (
    capsys.readouterr().out,
    result_tables.lossy({"lossy": document}, "lossy"),
  ):
    assert "x 9.00" in text and "total variation" in text


def test_tables_leave_the_results_of_another_run(monkeypatch, tmp_path):
  rows = [tabular.Equal(1.0, "rejection", 0.8)]
  monkeypatch.setattr(tabular, "at_equal_length", lambda: rows)
  tables = ["compare_rules", "--tables", f"--output={tmp_path}"]
  for _ in range(2):  # it may be repeated
    compare_rules.main(tables)
  results = tmp_path / "results.json"
  results.write_text("of another run")
  (tmp_path / "run.json").write_text('{"target": "x"}')
  with pytest.raises(SystemExit, match="holds a run with other settings"):
    compare_rules.main(tables)
  assert results.read_text() == "of another run"


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


def test_a_tree_is_built_from_other_noise_than_its_texts_have(
  target, tmp_path, monkeypatch
):
  """Rule 7: what decides how much is drafted has not seen it."""
  seen = []

  def by_depth(decoder, encoded):
    seen.append(programs.keys_of(decoder.key))
    return np.array([[1 / 6] * 6])

  module = comparison.expected_acceptance
  monkeypatch.setattr(module, "acceptance_by_depth", by_depth)
  sizes = {"prompt_size": 8, "max_new_tokens": 4, "temperature": 1.0}
  setup = Setup(str(target), drafter="early_exit(1)", k=1, **sizes)
  bench = comparison.Bench(setup.load_target(), [[1, 2, 3]])
  lines = files.Lines(tmp_path / "lines.jsonl")
  rates = comparison.measure_acceptance(bench, setup, 1, lines)
  assert all(np.sum(x) <= 1 and np.sum(x) > 0.9999 for x in rates.values())
  assert len(seen) == 2
  writing = programs.keys_of(bench.decoder(setup).key)
  assert not any(writing & one for one in seen)


CONFIG = presets.get("llama3-1b", "float32")
PASSES = {1: 0.5, 2: 0.6, 3: 0.7}


def test_rounds_are_predicted_by_bytes():
  """Worked out by hand, from times that were measured."""
  machine = drafter_comparison.Machine(CONFIG, PASSES, batch=1, context=0)
  least = pass_bound(CONFIG, 1, 1, 0).bytes / 0.5
  assert machine.read_rate == pytest.approx(least, rel=0.001)  # logits as well
  copied = machine.seconds(NO_COST, 2, 3, baseline=0.51)
  assert copied == pytest.approx(PASSES[3] + 0.01)
  assert machine.step_bytes(NO_COST) == 0
  # A draft as large as the target takes as long a step, and its first step
  # takes one token more, whose weights are read together.
  twin = drafter_cost.model(CONFIG)
  drafted = machine.seconds(twin, 2, 3, baseline=0.51)
  assert drafted == pytest.approx(copied + 2 * 0.5, rel=0.001)
  assert machine.step_bytes(twin) / machine.read_rate == pytest.approx(0.5)
  whole = drafter_cost.layer_skip(CONFIG, Skip())
  skipped = machine.seconds(whole, 2, 3, baseline=0.51)
  assert skipped == pytest.approx(copied + 2 * 0.5)
  behind_lookup = machine.seconds(whole, 1, 3, baseline=0.51)
  assert behind_lookup == pytest.approx(copied + 0.5)
  tree = machine.seconds(whole, (1, 1), 3, baseline=0.51)
  assert tree == pytest.approx(skipped, rel=0.001)  # it moves some KV


def test_an_early_exit_verifies_with_fewer_layers():
  machine = drafter_comparison.Machine(CONFIG, PASSES, batch=1, context=0)
  copied = machine.seconds(NO_COST, 1, 2, baseline=0.5)
  layers = CONFIG.num_layers
  assert layers == 16
  drafted = machine.seconds(DrafterCost(exit_layer=8), 1, 2, baseline=0.5)
  # Half of the layers run for the draft token's node, too, before they are
  # left out of verification.
  embedding = CONFIG.vocab_size * CONFIG.width
  share = 8 / 16 * (1 - embedding / CONFIG.num_parameters)
  head = embedding / CONFIG.num_parameters
  expected = copied - share * PASSES[2] + (2 * share + head) * 0.5
  assert drafted == pytest.approx(expected, rel=0.01)


def test_the_tree_is_as_deep_as_every_drafter_allows(target, tmp_path):
  path = tmp_path / "two.safetensors"
  config = HeadConfig("medusa", num_layers=0, levels=2, width=8)
  programs.save_drafter(target, path, config)
  names = ["early_exit(1)", f"medusa({path})"]
  setups = [Setup(str(target), drafter=name, k=1) for name in names]
  loaded = setups[0].load_target(others=setups)
  points = drafter_comparison.points_of(setups, loaded, (1, 2, 3), 3)
  assert {(p.setup.drafter, p.shape.name, p.shape.levels) for p in points} == {
    (names[0], "chain", 1), (names[0], "chain", 2), (names[0], "chain", 3),
    (names[1], "chain", 1), (names[1], "chain", 2),  # it has no third head
    (names[0], "tree", 2), (names[1], "tree", 2),
  }  # fmt: skip
  kinds = {
    p.setup.temperature: p.shape.setup(p.setup, "rejection").make_shape().spec
    for p in points
    if p.shape.name == "tree"
  }
  # Without noise every later child would be "what is left", token 0, 1, ...
  assert kinds[0.0].siblings == "deterministic"
  assert kinds[1.0].siblings == "without_replacement"
  assert all(spec.max_depth == 2 for spec in kinds.values())
  with pytest.raises(ValueError, match=r"k = 3; .*two.safetensors drafts 2"):
    dataclasses.replace(setups[1], k=3).check_sources()


def test_shapes_of_trees_are_priced_by_level():
  tree = drafter_comparison._tree(8, 4)
  setup = tree.setup(Setup(drafter="early_exit(1)"), "rejection")
  spec = setup.make_shape().spec
  assert spec.max_nodes == 9 and spec.max_depth == tree.levels <= 4
  assert np.count_nonzero(np.array(spec.parents) == 0) == 3
