"""The program compare_drafters on a tiny model, and what it predicts."""

import json

import numpy as np
import pytest

import programs
from specdec.benchmark import drafter_comparison, timing
from specdec.benchmark.setup import Setup
from specdec.drafters.heads import size
from specdec.drafters.heads.head_config import HeadConfig
from specdec.models import presets
from specdec.roofline import drafter_cost
from specdec.roofline.cost import pass_bound
from specdec.types import NO_COST, Skip

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
      *("--max_new_tokens=8", "--k=1,2", "--tree_size=3"),
      *arguments,
    )
    return json.loads((tmp_path / "out" / "results.json").read_text())

  return call


# Of somebody's own, and what it reads is unknown.
NOVICE = """
from specdec import drafters
def novice(shape):
  return drafters.lookup(shape=shape, min_ngram=0)._replace(cost=None)
"""


def test_a_table_and_a_picture_and_it_goes_on(
  compare, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(timing, "forget_programs", lambda: None)
  target = programs.write_model(tmp_path, num_layers=1)
  head = tmp_path / "prophet.safetensors"
  net = programs.save_drafter(target, head, HeadConfig("prophet", **SHAPE))
  (tmp_path / "mine.py").write_text(NOVICE)
  names = [f"model({target})", f"head({head})", f"{tmp_path}/mine.py:novice"]
  drafters = f"--drafters={'; '.join(names)}"
  arguments = f"--target={target}", drafters, "--k=1"
  with programs.waits() as waits:
    document = compare(*arguments)
  assert waits.count("compiling chain of 1, rejection") == 6
  points = [
    tuple(r["drafter"][x] for x in ("name", "temperature", "shape"))
    for r in document["runs"]
  ]
  shapes = dict(zip(names, [("chain", "tree")] * 2 + [["chain"]]))
  assert points == [
    (name, temperature, shape)
    for temperature in (0.0, 1.0)
    for name in names
    for shape in shapes[name]
  ]
  twin, _, head, *_, tree, novice = document["runs"]
  # The draft is the target: everything is kept.
  assert twin["acceptance"]["accepted_length"]["value"] == 1
  assert head["drafter"]["weights"] == size.num_weights(net)
  assert novice["predicted"] is novice["drafter"]["step_bytes"] is None
  passes = dict(document["pass_seconds"])
  assert set(passes) == {1, 2, 4}
  assert twin["predicted"] > 0 and tree["nodes"] == 4
  printed = capsys.readouterr().out
  speedup = f"{novice['speed']['speedup']['value']:.2f}"
  [*_, row] = [x for x in printed.splitlines() if ":novice" in x]
  # Of no tree, and its bytes are unknown.
  assert row.split()[1:6] == [speedup, "/", "-", "k=1:", speedup]
  out = tmp_path / "out"
  assert (out / "table.txt").read_text().strip() in printed
  assert (out / "plot.png").stat().st_size > 10_000

  lines = (out / "lines.jsonl").read_text().splitlines()
  (out / "lines.jsonl").write_text("\n".join(lines[:-3]) + '\n{"point": ["cut')
  again = compare(*arguments)
  kept, anew = (
    [run | {"predicted": 0} for run in d["runs"]] for d in (document, again)
  )
  assert kept == anew


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
  drafted = machine.seconds(drafter_cost.early_exit(8), 1, 2, baseline=0.5)
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


def test_heads_for_none_of_the_ks(compare, target, tmp_path):
  path = tmp_path / "one.safetensors"
  config = HeadConfig("medusa", num_layers=0, levels=1, width=8)
  programs.save_drafter(target, path, config)
  with pytest.raises(SystemExit, match=r"k = 2; .*one.safetensors has 1 heads"):
    compare(f"--drafters=lookup; head({path})", "--k=2,3")


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--k=0"], "--k"),
    (["--drafters=early_exit(9)"], "exit_layer = 9"),
    (["--drafters=;"], "--drafters names none"),
    (["--drafters=lookup | lookup(k=4)"], "how much it drafts is --k"),
    (["--drafters=lookup", "--acceptance=greedy"], "would not sample"),
    ([], "give its --drafters"),
  ],
)
def test_what_cannot_be_compared_is_refused(compare, arguments, sentence):
  with pytest.raises(SystemExit, match=sentence):
    compare(*arguments)


def test_shapes_of_trees_are_priced_by_level():
  tree = drafter_comparison._tree(8, 4)
  setup = tree.setup(Setup(drafter="early_exit(1)"), "rejection")
  spec = setup.make_shape().spec
  assert spec.max_nodes == 9 and spec.max_depth == tree.levels <= 4
  assert np.count_nonzero(np.array(spec.parents) == 0) == 3
