"""Setup: what it loads, and what it refuses."""

import dataclasses

import ml_collections
import numpy as np
import pytest

from specdec import checkpoints
from specdec.benchmark import runs
from specdec.benchmark.setup import Setup

SHORT = dict(target="stdlib-1m", prompt_size=16, max_new_tokens=12)
PROMPT = "def add(a, b):\n"
BEHIND = "| head(any.safetensors)"


@pytest.fixture(scope="module")
def baseline_texts():
  decoder = Setup(**SHORT).load().baseline()
  [batch] = decoder.encode([PROMPT])
  return decoder.complete(batch).texts


@pytest.mark.parametrize(
  "settings",
  [
    dict(drafter="model(stdlib-0.3m)", shape="chains(2)", k=2),
    dict(drafter="early_exit(1)", shape="optimal(4, [0.6, 0.2])", k=2),
    dict(drafter="early_exit(1)", shape="dynamic(4, top=2)", k=3),
  ],
  ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_coupled_text_is_the_baselines(settings, baseline_texts):
  decoder = Setup(**SHORT, **settings).load()
  [batch] = decoder.encode([PROMPT])
  completed = decoder.complete(batch)
  assert completed.texts == baseline_texts
  assert completed.num_rounds <= 12
  if "optimal" in settings.get("shape", ""):
    assert decoder.num_nodes == 5


def test_two_drafters_and_a_comparison():
  drafter = "lookup(k=3, min_ngram=1) | eagle(eagle)"
  settings = SHORT | dict(target="stdlib-11m", max_new_tokens=8)
  decoder = Setup(**settings, drafter=drafter, k=2).load()
  ways = {"both": decoder, runs.BASELINE: decoder.baseline()}
  comparison = runs.compare(ways, decoder.encode([PROMPT, [5, 6, 7]]))
  assert comparison.differences("both") == ()
  run = comparison.run("both", comparable=True)
  assert run.speed.tokens == run.speed.baseline_tokens
  assert np.isfinite(run.speed.speedup.value)


def test_a_config_is_a_setup():
  config = ml_collections.ConfigDict({"target": "stdlib-1m", "k": 2})
  assert Setup(**config) == Setup("stdlib-1m", k=2)


@pytest.mark.parametrize(
  "settings, complaint",
  [
    (dict(max_new_tokens=0), "max_new_tokens = 0; it must be >= 1"),
    (dict(k=-1), "k = -1"),
    (dict(k=5000), r"k = 5,000; it must be in 0\.\.4,096"),
    (dict(seed=2**32), "seed = 4294967296; it must be in"),
    (dict(shape="chains(1000000)"), "tokens; at most 4,096"),
    (dict(temperature=-1.0), "temperature = -1"),
    (dict(top_k=4), "temperature = 0 samples"),
    (dict(top_p=0.9), "temperature = 0 samples"),
    (dict(top_k=0, temperature=1.0), "top_k = 0; it must be an integer >= 1"),
    (dict(top_p=0.0, temperature=1.0), r"top_p = 0; it must be in \(0, 1\]"),
    (dict(drafter="model"), "missing a required argument: 'name'"),
    (dict(acceptance="synthetic([])"), "give at least one, in"),
    (dict(acceptance="synthetic(2)"), r"2 is outside \[0, 1\]"),
    (dict(drafter="lookups"), "lookup"),
    (dict(drafter="lookup | lookup | lookup"), "at most two"),
    (dict(acceptance="typical(eps=1)"), r"it is typical\(epsilon"),
    (dict(shape="optimal(3)"), r"it is optimal\(size"),
    (dict(shape="star"), "chain"),
    (dict(drafter="lookup(k=4)"), "for the first of two drafters"),
    (dict(drafter="lookup(ngram=five)"), r"lookup\(ngram=five\): "),
    (dict(k=2.5), "k = 2.5; it must be an integer"),
    (dict(temperature="hot"), "temperature = 'hot'; it must be a number"),
    (dict(temperature=True), "temperature = True; it must be a number"),
    (dict(batch=None), "batch = None; it must be an integer"),
    (dict(target=""), "target is empty"),
    (dict(dtype="float16"), "did you mean bfloat16"),
    (dict(target="preset:llama3-1b"), "a shape alone"),
    (dict(draft_ways=2), "draft_ways is for a mesh"),
    (dict(draft_ways=2, mesh="model:2"), "for a draft model or a trained h"),
    (dict(drafter="head(mtp)", draft_ways=0, mesh="model:2"), "must be >= 1"),
    (
      dict(drafter="head(mtp, weights=int8)", draft_ways=2, mesh="model:2"),
      "a trained head in integers is not shared out",
    ),
    (dict(mesh="rows:2"), "'rows:2' is no axis"),
    (dict(acceptance="greedy", temperature=1.0), "would not sample"),
    (dict(shape="chains(2)", drafter="lookup"), "chain"),
    (dict(shape="chains(2)", k=0, drafter="early_exit(1)"), "needs k >= 1"),
    (dict(shape="dynamic(4)", drafter="early_exit(1)"), "cache has room"),
    (dict(drafter="early_exit(layers=1)"), r"it is early_exit\(layer"),
    (
      dict(shape="chains(2)", drafter="model(x)", acceptance="block"),
      "block evaluates chains",
    ),
    (dict(drafter=f"lookup(k=-1) {BEHIND}"), "k = -1; it must be >= 0"),
    (dict(drafter=f"lookup(k=2, min_ngram=9) {BEHIND}"), "min_ngram = 9"),
    (
      dict(drafter=f"lookup(k=2, min_ngram=0) {BEHIND}"),
      r"drafter after \| never",
    ),
    (dict(drafter="suffix(depth=2)"), r"it is suffix\(corpus"),
    (dict(drafter="suffix(min_prob=2)"), "min_prob = 2; it must be in 0..1"),
    (dict(drafter="recycling(2)"), "recycling"),
    (dict(drafter="recycling(full=2)"), "full = 2; it must be a bool"),
    (dict(drafter="suffix", shape="chains(2)", k=2), "shape=dynamic"),
    (dict(drafter="recycling", shape="dynamic(3)", k=2), "static trees"),
    (dict(drafter="suffix", acceptance="kseq", temperature=1.0), "kseq"),
    *(
      (dict(acceptance=f"synthetic{arguments}", k=3), complaint)
      for arguments, complaint in (
        ("", "give rates or length"),
        ("(0.8, length=2)", "give rates or length"),
        ("(length=0.5)", "length = 0.5; a mean acceptance length is at"),
        ("(length=1e300)", "at most k"),
        ("(length=x)", "length = 'x'; it must be a number"),
        ("(length=[2])", r"length = \[2\]; it must be a number"),
        ("(length=True)", "length = True; it must be a number"),
        ("(length=4.5)", r"at most k \+ 1 = 4"),
      )
    ),
    # A second child would be accepted where the first was refused.
    (
      dict(acceptance="synthetic(length=1.5)", k=2, shape="chains(2)"),
      "a length is for chains",
    ),
  ],
)
def test_settings_that_cannot_work_are_refused(settings, complaint):
  with pytest.raises(ValueError, match=complaint):
    Setup(**{"target": "nowhere"} | settings)


@pytest.fixture
def tree_file(tmp_path):
  path = tmp_path / "tree.json"
  path.write_text("[[0], [1], [0, 0]]")
  return path


def test_shapes_by_calls(tree_file):
  def spec(shape, k=2, **settings):
    settings = dict(temperature=1.0, drafter="early_exit(1)") | settings
    return Setup(shape=shape, k=k, **settings).make_shape().spec

  tree = spec(f"paths({tree_file})")
  assert (tree.max_nodes, tree.max_depth, tree.siblings) == (
    4, 2, "without_replacement",
  )  # fmt: skip
  assert spec("chain", 3).chain
  assert spec("chains(3)").siblings == "without_replacement"
  assert spec("chains(3)", acceptance="kseq").siblings == "iid"
  assert spec("chains(3)", temperature=0.0).siblings == "deterministic"
  assert spec("chains(2, shared=1)", 3).max_nodes == 6
  optimal = spec("optimal(6, [0.5, 0.3], siblings=iid)")
  assert (optimal.max_nodes, optimal.max_depth) == (7, 2)
  assert spec("dynamic(6, top=3)").siblings == "deterministic"
  for text, content in (
    ("must hold a list of paths", '{"paths": 1}'),
    ("is there twice", "[[0], [0]]"),
    ("is not JSON", "[["),
  ):
    tree_file.write_text(content)
    with pytest.raises(ValueError, match=text):
      spec(f"paths({tree_file})")


@pytest.mark.parametrize(
  "settings, complaint",
  [
    (dict(drafter="early_exit(99)"), "has 2 layers"),
    (dict(drafter="layer_skip(attention=[99])"), "names layer 99"),
    (dict(drafter="medusa(eagle)"), "of kind eagle"),
    (
      dict(target="stdlib-11m", drafter="head(medusa)", k=8),
      "drafts 5 tokens in a row",
    ),
    (dict(drafter="model(stdlib-0.3m) | lookup"), "must be deterministic"),
    (dict(drafter="model(nowhere)"), "neither a path nor"),
    (dict(batch=10**8), "needs .* GiB .* are free"),
  ],
)
def test_setups_that_do_not_fit_are_refused_before_weights_are_read(
  settings, complaint, monkeypatch
):
  monkeypatch.setattr(checkpoints, "load", lambda *_: pytest.fail("loaded"))
  with pytest.raises((ValueError, OSError, MemoryError), match=complaint):
    Setup(**SHORT | settings).load_target()


def test_a_target_serves_setups_that_would_load_the_same(monkeypatch):
  setup = Setup(**SHORT, drafter="model(stdlib-0.3m)", k=2)
  target = setup.load_target()
  loads, load = [], checkpoints.load
  monkeypatch.setattr(
    checkpoints, "load", lambda *args: loads.append(args) or load(*args)
  )
  for k in (1, 2, 3):
    assert dataclasses.replace(setup, k=k).decoder(target).num_nodes == k + 1
  assert len(loads) == 1  # the draft's, once
  for changes in ({"dtype": "bfloat16"}, {"target": "stdlib-0.3m"}):
    with pytest.raises(ValueError, match="was loaded for"):
      dataclasses.replace(setup, **changes).decoder(target)


def test_a_tree_of_paths_decides_on_levels_and_checksums(tree_file):
  settings = SHORT | dict(drafter="early_exit(1)", shape=f"paths({tree_file})")
  assert Setup(**settings).levels == Setup(**settings, k=2).levels == 2
  with pytest.raises(ValueError, match="one tree, whatever k = 3"):
    Setup(**settings, k=3)
  before = Setup(**settings).checksums()
  tree_file.write_text("[[0], [0, 0]]")
  assert before and Setup(**settings).checksums() != before


def test_functions_of_a_users_file_may_have_any_names(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text(
    "from specdec import drafters\n"
    "def model(k):\n  return drafters.lookup(k)\n"
    "medusa = layer_skip = model\n"
  )
  for name in ("model", "medusa", "layer_skip"):
    setup = Setup(**SHORT, drafter=f"{path}:{name}", k=2)
    assert setup.load().num_nodes == 3


def test_a_users_drafter_is_not_asked_for_drafts_of_no_token(tmp_path):
  path = tmp_path / "mine.py"
  path.write_text("def drafter(k):\n  raise ValueError('no k')\n")
  assert Setup(**SHORT, drafter=f"{path}:drafter", k=0).load().num_nodes == 1


@pytest.mark.parametrize(
  "head, mesh, expected",
  [
    ("head(preset:eagle3)", 8, 8),
    ("lookup | head(preset:eagle3)", 8, 8),
    ("head(preset:eagle3, weights=int8)", 8, 1),
    ("head(preset:eagle3)", 3, 1),
    ("head(preset:dspark)", 8, 8),
  ],
)
def test_as_many_devices_share_out_a_head_as_can(head, mesh, expected):
  usual = dict(
    target="preset:llama3-8b", random_weights=True, drafter=head, k=2
  )
  setup = Setup(**usual, mesh=f"model:{mesh}")
  config = setup.target_config()
  assert setup.head_ways(config, mesh) == expected
  whole = dataclasses.replace(setup, draft_ways=1)
  assert whole.head_ways(config, mesh) == 1
