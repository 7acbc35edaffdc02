"""Handing over to engines: what is written, read back; what is refused."""

import json
import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

import programs
from specdec import checkpoints
from specdec.benchmark import handover, schedules, serving
from specdec.benchmark.schedules import Prices
from specdec.benchmark.setup import Setup
from specdec.checkpoints import learned
from specdec.cli import export as program
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.roofline import chips, planning

ROOT = pathlib.Path(__file__).parents[1]
CHIP = chips.get("v6e")
PAGE = ROOT / "docs" / "serving.md"
SHAPE = dict(width=16, num_heads=2, num_kv_heads=1, head_dim=8)
LAYERS = dict(layout="published", mlp_width=24, **SHAPE)


def published(kind, **options):
  return HeadConfig(kind, **LAYERS | options)


def block(**options):
  config = BlockConfig(mask_token=5, rank=3, **options)
  shape = dict(features=(2, 4), levels=3, head="shared")
  return published("block", **shape, block=config)


MEDUSA = dict(width=16, num_layers=0, levels=3)
HEADS = {
  "eagle3": published("eagle3", features=(2, 4, 5)),
  "early": published("eagle3", features=(1, 2, 3)),
  "low": published("eagle3", features=(0, 2, 4)),
  "shared": published(
    "eagle3", features=(2, 4, 5), head="shared", feature_norm="each"
  ),
  "mtp": published("mtp", head="shared", feeds_back_norm=True, qk_norm=True),
  "eagle": published("eagle", head="shared", bias=True),
  "plain": published("eagle", head="shared"),
  "peagle": published("peagle", features=(2, 4, 5), mask_token=5),
  "peagle31": published(
    "peagle", features=(2,), mask_token=5, feature_norm="each"
  ),
  "dflash": block(),
  "jetspec": block(causal=True),
  "dflash2": block(successor="selector", taps=2, group=4),
  "dspark": block(successor="markov", slots="next", confidence=True),
  "gated": block(successor="gated_markov", slots="next"),
  "domino": block(successor="gru", slots="next"),
  "next": block(slots="next"),
  "medusa": HeadConfig("medusa", layout="published", **MEDUSA),
  "hydra": HeadConfig("hydra", **MEDUSA),
  "compact": HeadConfig("eagle3", features=(2, 4, 5), mlp_width=24, **SHAPE),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A target of eight layers, a draft, and a head of every kind."""
  place = tmp_path_factory.mktemp("handover")
  target = programs.write_model(place / "target", num_layers=8)
  programs.write_model(place / "draft", seed=1)
  for name, head_config in HEADS.items():
    programs.save_drafter(target, place / f"{name}.safetensors", head_config)
  return place


def drafter_of(place, name):
  if name == "lookup":
    return "lookup(ngram=4, min_ngram=2)"
  if name == "suffix":
    return "suffix(max_match=8, factor=2.0, min_prob=0.2)"
  if name == "model":
    return f"model({place / 'draft'})"
  return f"head({place / name}.safetensors)"


def export(place, output, name, engine, *flags, k=3):
  """Runs the program and returns its handover.json."""
  programs.run(
    "export",
    f"--target={place / 'target'}",
    f"--drafter={drafter_of(place, name)}",
    f"--k={k}",
    f"--engine={engine}",
    f"--output={output}",
    "--dtype=float32",
    *flags,
  )
  return json.loads((output / handover.NAME).read_text())


def equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_shell(entry):
  """The line is the command, and nothing unquoted means more to a shell."""
  words = [f"{name}={x}" for name, x in entry["environment"].items()]
  words = [*(["env", *words] if words else ()), *entry["command"]]
  assert shlex.split(entry["shell"]) == words
  bare = re.sub(r"'[^']*'", "", entry["shell"])
  assert re.fullmatch(r"[\w@%+=:,./ -]*", bare)


SERVED = {
  ("vllm", "lookup"): {
    "method": "ngram",
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
  },
  ("vllm", "suffix"): {
    "method": "suffix",
    "num_speculative_tokens": 3,
    "suffix_decoding_max_tree_depth": 11,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.2,
    "suffix_decoding_max_cached_requests": 0,
    "draft_sample_method": "greedy",
  },
  ("vllm", "model"): {"method": "draft_model"},
  ("vllm", "eagle3"): {"method": "eagle3"},
  ("vllm", "early"): {"method": "eagle3"},
  ("vllm", "shared"): {"method": "eagle3"},
  ("vllm", "mtp"): {"method": "mtp"},
  ("vllm", "plain"): {"method": "eagle"},
  ("vllm", "medusa"): {"method": "medusa"},
  ("vllm", "peagle"): {"method": "eagle3", "parallel_drafting": True},
  ("vllm", "dflash"): {"method": "dflash"},
  ("vllm", "jetspec"): {"method": "dflash"},
  ("vllm", "dflash2"): {"method": "dflash"},
  ("vllm", "dspark"): {"method": "dspark"},
  ("vllm-tpu", "lookup"): {"method": "ngram"},
  ("vllm-tpu", "eagle3"): {"method": "eagle3"},
  ("sglang", "lookup"): {"speculative-algorithm": "NGRAM"},
  ("sglang", "model"): {"speculative-algorithm": "STANDALONE"},
  ("sglang", "eagle3"): {"speculative-algorithm": "EAGLE3"},
  ("sglang", "eagle"): {"speculative-algorithm": "EAGLE"},
  ("sglang", "dflash"): {
    "speculative-algorithm": "DFLASH",
    "speculative-num-draft-tokens": 4,
  },
  ("sglang", "dflash2"): {"speculative-algorithm": "DFLASH"},
  ("sglang-jax", "eagle3"): {"speculative-algorithm": "EAGLE3"},
  ("tensorrt-llm", "lookup"): {"decoding_type": "NGram"},
  ("tensorrt-llm", "model"): {"decoding_type": "DraftTarget"},
  ("tensorrt-llm", "eagle3"): {"decoding_type": "Eagle3"},
}


@pytest.mark.parametrize("engine, name", SERVED)
def test_what_is_written_is_read_back(engine, name, place, tmp_path):
  output = tmp_path / "a folder; $it"
  document = export(place, output, name, engine)
  entry = document["engines"][engine]
  config = json.loads((output / handover.file_of(engine)).read_text())
  assert config == entry["config"]
  inner = config.get("speculative_config", config)
  assert SERVED[engine, name].items() <= inner.items()
  assert_shell(entry)
  assert str(output / "target") in entry["command"]
  first = checkpoints.load(place / "target")
  target = checkpoints.load(output / "target")
  equal(first.params, target.params)
  assert (output / "target" / "generation_config.json").is_file()
  assert (output / "target" / "tokenizer.json").is_file()
  drafter = output / "drafter"
  if name in ("lookup", "suffix"):
    assert not drafter.exists()
    return
  assert str(drafter) in json.dumps(entry)
  if name == "model":
    draft = checkpoints.load(place / "draft")
    equal(draft.params, checkpoints.load(drafter).params)
    return
  theirs = learned.load(drafter, target)
  ours = learned.load(place / f"{name}.safetensors", first)
  equal(ours.net, theirs.net)
  assert theirs.head_config.features == ours.head_config.features
  config = json.loads((drafter / "config.json").read_text())
  if engine == "vllm" and name in ("eagle3", "mtp", "peagle", "dspark"):
    verifier = config["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(output / "target")
  if name.startswith("dflash"):
    two = "2" if name == "dflash2" else ""
    assert config["architectures"] == [f"DFlash{two}DraftModel"]
  elif engine.startswith("sglang"):
    ending = "Eagle3" if name == "eagle3" else "Eagle"
    assert config["architectures"] == [f"LlamaForCausalLM{ending}"]


def test_layers_are_named_as_each_engine_does(place, tmp_path):
  """SGLang and TensorRT-LLM name the layer that a stream leaves."""
  document = export(place, tmp_path / "a", "early", "all")
  assert {*document["engines"]} == {"vllm", "sglang", "tensorrt-llm"}
  for engine in ("vllm-tpu", "sglang-jax"):
    assert "features = (2, 4, 5) only" in document["refused"][engine]
  key = "eagle_aux_hidden_state_layer_ids"
  read = {
    engine: json.loads(
      (tmp_path / f"a/drafter-{engine}/config.json").read_text()
    )
    for engine in document["engines"]
  }
  assert read["vllm"][key] == [1, 2, 3]
  assert read["sglang"]["eagle_config"][key] == [0, 1, 2]
  config = document["engines"]["tensorrt-llm"]["config"]["speculative_config"]
  assert config["eagle3_layers_to_capture"] == [0, 1, 2]


def test_a_target_that_the_engine_has_is_not_written(place, tmp_path):
  document = export(
    place, tmp_path / "a", "eagle3", "vllm", "--target_as=org/name"
  )
  assert not (tmp_path / "a" / "target").exists()
  assert document["engines"]["vllm"]["command"][:3] == [
    *("vllm", "serve", "org/name"),
  ]
  config = json.loads((tmp_path / "a/drafter/config.json").read_text())
  verifier = config["speculators_config"]["verifier"]
  assert verifier["name_or_path"] == "org/name"


def handed(place, name="model", **settings):
  setup = Setup(
    str(place / "target"),
    **{"drafter": drafter_of(place, name), "k": 3} | settings,
  )
  return handover.describe(setup)


def serve(place, engine, name="model", schedule=None, **settings):
  where = serving.Place("T", "D", "C")
  return serving.serve(engine, handed(place, name, **settings), where, schedule)


@pytest.mark.parametrize(
  "rule, drawn, method",
  [
    ("rejection", "probabilistic", "standard"),
    ("block", "probabilistic", "block"),
    ("naive", "greedy", "standard"),
    ("coupled", "probabilistic", "standard"),
  ],
)
def test_rules_of_vllm(rule, drawn, method, place):
  served = serve(place, "vllm", acceptance=rule, temperature=1.0)
  assert served.config["draft_sample_method"] == drawn
  assert served.config["rejection_sample_method"] == method
  known = rule in ("rejection", "block")
  assert any(rule in text for text in served.warnings) != known
  greedy = serve(place, "vllm", acceptance=rule)
  assert greedy.config["draft_sample_method"] == "greedy"


def test_synthetic_acceptance_is_handed_over(place):
  vllm = serve(place, "vllm", acceptance="synthetic(length=2.5)")
  assert vllm.config["synthetic_acceptance_length"] == 2.5
  vllm = serve(place, "vllm", acceptance="synthetic([0.5, 0.25])", k=3)
  assert vllm.config["synthetic_acceptance_rates"] == [0.5, 0.125, 0.03125]
  assert "the engine's text is meaningless" in vllm.warnings[-1]
  sglang = serve(place, "sglang", acceptance="synthetic(length=2.5)")
  assert sglang.shell.startswith("env SGLANG_SIMULATE_ACC_LEN=2.5 SGLANG_")
  trt = serve(place, "tensorrt-llm", acceptance="synthetic(length=3)")
  name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
  assert trt.environment == {name: "2"}


def test_what_is_said_of_drafts_that_an_engine_writes_its_own_way(place):
  cut = serve(place, "vllm", "dflash", k=2)
  assert "2 draft tokens of the 3 that it was trained" in " ".join(cut.warnings)
  for name in ("dflash", "jetspec"):  # a causal block may be cut
    k = 3 if name == "dflash" else 2
    assert not serve(place, "vllm", name, k=k).warnings
  ranges = [planning.BatchRange(1, 8, 3), planning.BatchRange(9, 128, 1)]
  assert (
    "num_speculative_tokens_per_batch_size"
    in serve(place, "vllm", "dflash", ranges).config
  )
  choice = serve(place, "vllm", "dflash2", ranges)
  assert "num_speculative_tokens_per_batch_size" not in choice.config
  assert "V2 model runner" in choice.warnings[0]
  assert "one k at all batches" in choice.warnings[1]
  copies = serve(place, "vllm", drafter="suffix(corpus=old.txt)")
  assert "suffix_decoding_max_cached_requests" not in copies.config
  assert "corpus is left out" in " ".join(copies.warnings)
  drawn = serve(place, "vllm", "dspark", temperature=1.0)
  assert drawn.config["draft_sample_method"] == "probabilistic"


def test_a_head_that_its_format_does_not_hold_is_refused_first(place, tmp_path):
  with pytest.raises(SystemExit, match=r"block\.slots = 'next': dflash knows"):
    export(place, tmp_path / "a", "next", "all")
  assert not (tmp_path / "a").exists()
  document = export(place, tmp_path / "b", "low", "all")
  assert {*document["engines"]} == {"vllm"}
  for engine in ("sglang", "tensorrt-llm"):
    assert "embeddings leave none" in document["refused"][engine]


def test_dynamic_trees(place):
  tree = dict(shape="dynamic(6, top=3)", name="eagle3")
  flags = serve(place, "sglang", **tree).config
  assert flags["speculative-num-steps"] == flags["speculative-eagle-topk"] == 3
  assert flags["speculative-num-draft-tokens"] == 7
  config = serve(place, "tensorrt-llm", **tree).config["speculative_config"]
  assert config["use_dynamic_tree"] and config["max_total_draft_tokens"] == 6


@pytest.mark.parametrize(
  "engine, name, settings, message",
  [
    ("vllm", "lookup", {"k": 0}, "k = 0 drafts nothing"),
    ("vllm", "hydra", {}, "drafts in no engine here; of our drafters"),
    ("vllm", "compact", {}, "layout = 'published'"),
    ("vllm", "medusa", {"k": 4}, "3 heads"),
    ("vllm", "model", {"drafter": "early_exit(1)"}, "drafts in no engine"),
    ("vllm", "model", {"drafter": "model(stdlib-1m, kv=int8)"}, "leave kv"),
    ("vllm", "model", {"drafter": "quantized"}, "drafts in no engine"),
    ("vllm", "model", {"drafter": "layer_skip(mlp=[1])"}, "in no engine"),
    ("vllm", "model", {"drafter": "lookup(k=2) | lookup"}, "two drafters"),
    ("vllm", "model", {"shape": "chains(2)"}, "no engine here drafts such"),
    ("vllm", "eagle3", {"shape": "dynamic(6)"}, "vllm drafts chains only"),
    ("sglang-jax", "eagle3", {"shape": "dynamic(6)"}, "drafts chains only"),
    ("tensorrt-llm", "model", {"shape": "dynamic(6)"}, "with Eagle3 alone"),
    ("sglang", "plain", {}, "has a bias in fc"),
    ("sglang", "mtp", {}, "sglang has no drafter mtp"),
    ("sglang", "suffix", {}, "sglang has no drafter suffix"),
    ("sglang", "dflash", {"shape": "dynamic(6)"}, "DFLASH is handed over as a"),
    ("sglang", "dflash2", {"k": 2}, "SGLang drafts as many .* give k = 3"),
    ("vllm", "dflash2", {"k": 2}, "dflash2 wants all of its own: give k = 3"),
    ("vllm", "dspark", {"k": 1}, "dspark wants all of its own: give k = 3"),
    ("vllm", "dflash", {"k": 4}, "this block has slots for 3"),
    ("vllm", "gated", {}, "DSpark has a Markov head of type vanilla; this one"),
    ("vllm", "domino", {}, "drafts in no engine here; of our drafters"),
    ("vllm", "peagle31", {}, "P-EAGLE has no norm for each stream"),
    ("vllm-tpu", "model", {}, "vllm-tpu has no drafter model; it has eagle3"),
    ("sglang-jax", "shared", {}, "feature_norm = 'none' only"),
    ("tensorrt-llm", "medusa", {}, "tensorrt-llm has no drafter medusa"),
    ("vllm", "model", {"acceptance": "lenience"}, "lossy rule lenience"),
    ("vllm", "model", {"acceptance": "typical"}, "lossy rule typical"),
    ("sglang", "model", {"acceptance": "relaxed"}, "lossy rule relaxed"),
    ("sglang", "model", {"acceptance": "synthetic(0.5)"}, "rule synthetic"),
    ("vllm-tpu", "eagle3", {"acceptance": "synthetic(0.5)"}, "synthetic"),
    (
      *("tensorrt-llm", "model", {"acceptance": "synthetic(length=2.5)"}),
      "of a whole number",
    ),
  ],
)
def test_what_an_engine_refuses(engine, name, settings, message, place):
  with pytest.raises(ValueError, match=message) as error:
    serve(place, engine, name, **settings)
  assert "\n" not in str(error.value)


def test_a_schedule_is_the_best_k_of_every_batch(place, tmp_path):
  setup = Setup("stdlib-11m", drafter="model(stdlib-1m)", k=6)
  prices = Prices(chips.get("v5e"), 1, 512, 0.6, 128)
  ranges = prices.schedule(setup, "bfloat16")
  assert [one.first for one in ranges[1:]] == [x.last + 1 for x in ranges[:-1]]
  assert ranges[0].first == 1 and ranges[-1].last == 128
  config = serve(place, "vllm", schedule=ranges).config
  assert config["num_speculative_tokens_per_batch_size"] == [
    list(one) for one in ranges
  ]
  assert config["num_speculative_tokens"] == 3
  nothing = [planning.BatchRange(1, 128, 0)]
  served = serve(place, "vllm", schedule=nothing)
  assert "num_speculative_tokens_per_batch_size" not in served.config
  assert "no batch pays" in " ".join(served.warnings)
  falling = [planning.BatchRange(1, 8, 3), planning.BatchRange(9, 128, 0)]
  config = serve(place, "tensorrt-llm", schedule=falling).config
  assert config["speculative_config"]["draft_len_schedule"] == {8: 3}


def test_what_was_measured_makes_the_schedule(place, tmp_path):
  drafter = drafter_of(place, "model")
  values = [0.7, 0.5, 0.3]
  run = {
    "k": 3,
    "acceptance": {"prefix_acceptance": [{"value": x} for x in values]},
  }
  path = tmp_path / "bench.json"
  flags = "--chip=v6e", f"--measured={path}", "--largest_batch=32"
  # Of eval.py: kinds of prompts come first, and a position counts the rounds
  # that drafted so far.
  last = {"prefix_acceptance": [{"value": x} for x in (0.7, 0.5, 0.6)]}
  kinds = {"k": 3, "group": "code", "acceptance": run["acceptance"]}
  whole = {"k": 3, "group": "all", "acceptance": last}
  path.write_text(
    json.dumps({"runs": [kinds, whole], "settings": {"drafter": "lookup"}})
  )
  assert schedules.measured(str(path), "lookup") == [0.7, 0.5, 0.5]
  document = {"runs": [run], "settings": {"drafter": drafter}}
  path.write_text(json.dumps(document))
  done = export(place, tmp_path / "a", "model", "vllm", *flags)["schedule"]
  assert done["prefix_acceptance"] == values and done["chip"] == CHIP.name
  assert done["ranges"][-1][1] == 32
  document["settings"]["drafter"] = "lookup"
  path.write_text(json.dumps(document))
  with pytest.raises(SystemExit, match="was measured with lookup, not with"):
    export(place, tmp_path / "b", "model", "vllm", *flags)
  path.write_text("{}")
  with pytest.raises(SystemExit, match="is no document of bench"):
    export(place, tmp_path / "b", "model", "vllm", *flags)
  assert not (tmp_path / "b").exists()


def test_the_commands_of_the_page_say_what_can_be_handed_over():
  blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
  lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
  commands = [
    shlex.split(line, comments=True) for line in lines if "export.py" in line
  ]
  given = [program.main.parse(command[1:]) for command in commands]
  assert {options.engine for options in given} == {*serving.ENGINES, "all"}
  for options in given:
    kind = options.drafter.partition("(")[0]
    engines = serving.ENGINES.values()
    if options.engine != "all":
      engines = [serving.ENGINES[options.engine]]
    assert any(kind in engine.methods for engine in engines)


def test_the_page_lists_what_engines_have():
  row = r"^\| `([a-z][\w-]+)` \| (.*?) \| (.*?) \|"
  rows = re.findall(row, PAGE.read_text(), re.M)
  listed = {name: (kinds, keys) for name, kinds, keys in rows}
  assert {*serving.ENGINES} == {*listed}
  for name, (kinds, keys) in listed.items():
    engine = serving.ENGINES[name]
    assert {*re.findall(r"`(\w+)`", kinds)} == {*engine.methods}
    assert keys == engine.keys
