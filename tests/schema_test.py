"""Documents of programs on tiny models: what they hold and how runs resume.

docs/schema.json describes what they write, no less.
"""

import contextlib
import functools
import io
import json
import pathlib
import re

import jsonschema
import numpy
import pytest
import safetensors.numpy

import programs
from specdec.benchmark import metrics, peers, reproduction, timing
from specdec.cli import compare_rules
from specdec.drafters.heads.head_config import HeadConfig
from specdec.report import tables
from specdec.testing import tabular

PATH = pathlib.Path(__file__).parents[1] / "docs" / "schema.json"
SCHEMA = json.loads(PATH.read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
# Which older documents lack.
COUNTS = "speculative_decoding"
OPTIONAL = (
  *(COUNTS, "accepted_on_tables", "optimum_on_tables"),
  *("length", "equal_length", "exact", "samples"),
)
OPEN = "settings", "versions", "flops"  # their members go by many names
HEAD = dict(width=8, mlp_width=12, num_heads=2, head_dim=4)
PROMPTS = [{"prompt": "abcabc"}, {"prompt": "hello there"}]
GROUPS = [
  {"question_id": 7, "category": "writing", "turns": ["hello there", "more"]},
  {"question_id": 9, "category": "coding", "turns": ["abcabcabc"]},
  {"category": "translation", "prompt": "ein zwei drei"},
  {"category": "translation", "prompt": "vier"},
  {"category": "translation", "prompt": "too many for the limit"},
  {"category": "translation", "prompt": "a far longer one " * 8},
  {"token_ids": [1, 2, 3, 1, 2, 3]},
]
LOSSY = "lenience(share=0.25)"
# Of somebody's own, and what it reads is unknown.
NOVICE = """
from specdec import drafters
def novice(shape):
  return drafters.lookup(shape=shape, min_ngram=0)._replace(cost=None)
"""


class Parrot:
  """An engine that knows one token."""

  def read(self, ids):
    pass

  def step(self, ids):
    return 1

  def rewind(self, length):
    pass


PEERS = {
  "parrot": peers.Peer({"numpy": "numpy"}, lambda *_: Parrot()),
  "dodo": peers.Peer({"no_such_engine": "dodo-engine"}, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model of one layer, a head of it, a drafter of one's own, prompts."""
  folder = programs.write_model(tmp_path_factory.mktemp("model"), num_layers=1)
  head = HeadConfig("prophet", **HEAD)
  programs.save_drafter(folder, folder / "head.safetensors", head)
  (folder / "mine.py").write_text(NOVICE)
  for name, lines in (("prompts", PROMPTS), ("groups", GROUPS)):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text)
  with (folder / "groups.jsonl").open("a") as file:
    file.write('{"prompt":\n')
  return folder


@pytest.fixture(scope="module")
def run(folder):
  """Runs a program, once: its document and what it printed."""
  head = f"head({folder}/head.safetensors)"
  names = f"model({folder}); {head}; {folder}/mine.py:novice"
  prompts = f"--prompt_file={folder}/prompts.jsonl"
  arguments = {
    "greedy": ["--k=2", prompts, "--drafter=lookup(min_ngram=0)"],
    "sampled": [
      *("--k=2", "--prompt=ab", "--temperature=1", "--acceptance=rejection"),
    ],
    "bench": [
      *("--k=2", "--context=8", "--repeats=2", "--passes=2", "--limit=2"),
      *("--length=entropy(limit=0.4)", "--most_k=3"),
      f"--drafter=model({folder})",
    ],
    "eval": [
      *(f"--prompt_file={folder}/groups.jsonl", "--k=1,2", "--batch=2"),
      *(f"--drafter=lookup(k=4) | {head}", "--limit=2"),
      "--max_prompt_tokens=40",
    ],
    # Rules of chains; the draft is the target.
    "compare_rules": [
      *(prompts, f"--drafter=model({folder})", "--temperature=1"),
      *("--sizes=2", f"--only=block; {LOSSY}"),
    ],
    "compare_drafters": [
      *(prompts, f"--drafters={names}", "--k=1", "--tree_size=3"),
    ],
    "compare_engines": [prompts, "--drafters=lookup", "--repeats=2"],
    "goodput": [
      *(prompts, "--drafter=lookup(min_ngram=0)", "--k=2", "--requests=3"),
      *("--repeats=2", "--loads=0.9,inf"),
    ],
  }

  @functools.cache
  def run(name):
    path = folder / f"{name}.json"
    flags = [f"--target={folder}", "--max_new_tokens=8", *arguments[name]]
    if name not in ("compare_rules", "compare_drafters"):
      flags.append(f"--json={path}")
    if name in ("eval", "compare_rules", "compare_drafters"):
      flags.append(f"--output={folder / name}")
      path = folder / name / "results.json"
    printed = io.StringIO()
    with (
      contextlib.redirect_stdout(printed),
      pytest.MonkeyPatch.context() as at,
    ):
      programs.fake_machine(at)
      at.setattr(timing, "forget_programs", lambda: None)
      at.setattr(peers, "PEERS", PEERS)
      program = "generate" if name in ("greedy", "sampled") else name
      programs.run(program, *flags)
    return json.loads(path.read_text()), printed.getvalue()

  return run


def assert_files(folder, printed):
  """What was printed is in a file, and there is a picture."""
  assert (folder / "table.txt").read_text().strip() in printed
  assert (folder / "plot.png").stat().st_size > 10_000


def test_eval_reports_by_group_and_k(folder, run):
  document, printed = run("eval")
  groups = {"mt_bench": 2, "translation": 2, "groups": 1, "all": 5}
  assert [
    (run["group"], run["k"], run["acceptance"]["texts"])
    for run in document["runs"]
  ] == [(name, k, texts) for name, texts in groups.items() for k in (1, 2)]
  for run in document["runs"]:
    assert run["identity"]["share"] == 1
    assert run["acceptance"]["emitted"] == 8 * run["identity"]["texts"]
    assert run["speed"]["speedup"]["value"] > 0
    assert run["nodes"] == 5
  # The sums of all are the groups' sums.
  *parts, whole = (run["acceptance"] for run in document["runs"][1::2])
  assert sum(x["target_passes"] for x in parts) == whole["target_passes"]
  assert whole["accepted_lengths"][4] > 0  # a copy, kept whole
  assert whole["accepted"] < whole["drafted"]
  log = (folder / "eval" / "run.json").read_text()
  assert '"drafter": "lookup(k=4) | head(' in log
  assert "1 prompts of more than 40 tokens were left out" in printed
  assert "1 broken lines were skipped" in printed
  assert document["too_long"] == len(document["broken_lines"]) == 1
  assert_files(folder / "eval", printed)
  assert json.loads((folder / "eval.json").read_text()) == document


@pytest.mark.slow
def test_rules_are_compared_and_a_killed_comparison_goes_on(folder, run):
  with programs.waits() as waits:
    document, printed = run("compare_rules")
  assert "counting expected tokens, chain of 2" in waits
  assert "compiling chain of 2, block" in waits
  block, lenient = document["runs"]
  assert block["comparison"]["rule"] == "block"
  assert lenient["comparison"]["rule"] == LOSSY
  assert block["nodes"] == 3
  # The draft is the target: everything is kept.
  assert block["expected"]["value"] == pytest.approx(2, abs=1e-4)
  assert block["acceptance"]["accepted_length"]["value"] == 2
  assert 0 < block["comparison"]["distance"] < 1e-6  # measured, not assumed
  assert lenient["comparison"]["distance"] > 0.1
  best = block["comparison"]["optimum_on_tables"]
  assert block["comparison"]["accepted_on_tables"] == pytest.approx(best)
  assert lenient["comparison"]["accepted_on_tables"] > best
  assert "of optimum" in printed and "100.0%" in printed
  assert any("4 times as often" in text for text in document["caveats"])
  assert "lossy, TV 0." in printed
  assert "warning: lossy: a token may come up to 4 times" in printed
  assert "best tree by the times of this run: " in printed
  assert_files(folder / "compare_rules", printed)
  paths = json.loads((folder / "compare_rules" / "tree.json").read_text())
  assert paths == document["tree"]["paths"]

  lines = (folder / "compare_rules" / "lines.jsonl").read_text().splitlines()
  kept = [line for line in lines if '"lenience' not in line]
  passes = [line for line in kept if '"pass"' in line]
  kept.remove(passes[0])  # and was killed while passes were timed
  cut = "\n".join(kept) + '\n{"point": ["cut'
  (folder / "compare_rules" / "lines.jsonl").write_text(cut)
  again, _ = run.__wrapped__("compare_rules")
  assert again["runs"][0] == block
  assert again["runs"][1]["expected"] == lenient["expected"]


def test_drafters_are_compared_and_a_killed_comparison_goes_on(folder, run):
  with programs.waits() as waits:
    document, printed = run("compare_drafters")
  assert waits.count("compiling chain of 1, rejection") == 6
  fields = "kind", "temperature", "shape"
  points = [tuple(r["drafter"][x] for x in fields) for r in document["runs"]]
  drawn = [("model", "chain"), ("model", "tree"), ("prophet", "chain")]
  drawn += [("prophet", "tree"), ("lookup", "chain")]
  assert points == [
    (name, t, shape) for t in (0.0, 1.0) for name, shape in drawn
  ]
  twin, _, head, *_, tree, novice = document["runs"]
  # The draft is the target: everything is kept.
  assert twin["acceptance"]["accepted_length"]["value"] == 1
  weights = safetensors.numpy.load_file(folder / "head.safetensors")
  assert head["drafter"]["weights"] == sum(x.size for x in weights.values())
  assert novice["predicted"] is novice["drafter"]["step_bytes"] is None
  assert set(dict(document["pass_seconds"])) == {1, 2, 4}
  assert twin["predicted"] > 0 and tree["nodes"] == 4
  speedup = str(metrics.Estimate(**novice["speed"]["speedup"]))
  [*_, row] = [x for x in printed.splitlines() if ":novice" in x]
  # Of no tree, and its bytes are unknown.
  assert " ".join(row.split()[1:]).startswith(f"{speedup} / - k=1: {speedup} ")
  assert_files(folder / "compare_drafters", printed)

  path = folder / "compare_drafters" / "lines.jsonl"
  lines = path.read_text().splitlines()
  path.write_text("\n".join(lines[:-3]) + '\n{"point": ["cut')
  again, _ = run.__wrapped__("compare_drafters")
  kept, anew = (
    [run | {"predicted": 0} for run in d["runs"]] for d in (document, again)
  )
  assert kept == anew


def test_engines_are_compared_and_missing_ones_named(run):
  document, printed = run("compare_engines")
  names = ["baseline", "lookup, k = 5", "parrot"]
  assert [engine["name"] for engine in document["engines"]] == names
  baseline, lookup, parrot = document["engines"]
  assert [x["new_tokens"] for x in document["decoded"]] == [8, 8]
  assert document["decoded"][0]["prompt_tokens"] == len("abcabc")
  for engine in document["engines"]:
    assert len(engine["tokens_per_second"]) == 2
    assert engine["mean"]["value"] > 0
  assert baseline["speedup"] == {"value": 1, "error": 0, "samples": 2}
  assert baseline["identity"]["share"] == lookup["identity"]["share"] == 1
  assert parrot["identity"]["same"] == 0
  assert "parrot: prompt 0 leaves it at new token" in printed
  assert [n for n, _ in parrot["pass_seconds"]] == [1, 8]
  assert lookup["pass_seconds"] is None
  assert document["versions"]["numpy"] == numpy.__version__
  sentence = "dodo was left out: not installed: pip install dodo-engine"
  assert sentence in document["caveats"]
  assert f"warning: {sentence}" in printed


def test_vllms_metrics_stand_beside_ours(run):
  document, printed = run("greedy")
  [acceptance] = [x["acceptance"] for x in document["runs"]]
  counts = acceptance[COUNTS]
  assert counts["num_spec_tokens"] == 2 and counts["num_spec_steps"] > 0
  length = f"{counts['mean_acceptance_length']:.2f}"
  share = f"{counts['draft_acceptance_rate']:.0%}"
  [row] = [x for x in printed.splitlines() if "mean acceptance length" in x]
  assert row.split("length")[1].strip() == f"{length} ({share} of draft tokens)"
  for name in ("bench", "eval"):
    document, printed = run(name)
    [head] = [x for x in printed.splitlines() if "acceptance length" in x]
    assert "tokens/pass  acceptance length" in head
    for one in document["runs"]:
      length = tables.acceptance_length(one)
      assert re.search(rf"^ .*  {re.escape(length)}  ", printed, re.M)


@pytest.mark.parametrize("name", ["pair_greedy", "smollm2_lookup", "rules"])
def test_older_documents_stay_valid_and_are_shown(name):
  path = PATH.parents[1] / "results" / f"{name}.json"
  document = json.loads(path.read_text())
  for one in document["runs"]:
    one["acceptance"].pop(COUNTS, None)
    assert tables.acceptance_length(one) == "-"
  VALIDATOR.validate(document)


def objects(schema):
  """Every schema of an object in a schema."""
  if isinstance(schema, list):
    schema = dict(enumerate(schema))
  if isinstance(schema, dict):
    if "properties" in schema:
      yield schema
    for value in schema.values():
      yield from objects(value)


def members(document, path=()):
  """Every (object, name of a member, names on the way to it), without what is
  in the open ones."""
  if isinstance(document, list):
    for value in document:
      yield from members(value, path)
  elif isinstance(document, dict):
    for name, value in document.items():
      yield document, name, (*path, name)
      if name not in OPEN:
        yield from members(value, (*path, name))


def assert_refuses_faults(document, seen):
  """No member may be missing, added or of another type; `seen` were tried."""
  for place, name, path in list(members(document)):
    case = path, type(place[name])
    if case in seen:
      continue
    seen.add(case)
    kept = dict(place)
    place["unheard_of"] = 1
    assert not VALIDATOR.is_valid(document)
    del place["unheard_of"]
    place[name] = 1 if isinstance(place[name], str) else "1"
    assert not VALIDATOR.is_valid(document), name
    del place[name]
    assert VALIDATOR.is_valid(document) == (name in OPTIONAL), name
    place |= kept


def test_is_a_schema_that_describes_every_property_and_allows_no_other():
  VALIDATOR.check_schema(SCHEMA)
  for schema in objects(SCHEMA):
    assert schema["additionalProperties"] is False
    for name, value in schema["properties"].items():
      assert value.get("description", "").endswith("."), name


def test_real_documents_are_of_this_form_and_show_all_of_it(
  run, tmp_path, monkeypatch
):
  names = "greedy", "sampled", "bench", "eval", "compare_rules"
  names += "compare_drafters", "compare_engines", "goodput"
  documents = {name: run(name)[0] for name in names}
  monkeypatch.setattr(tabular, "_HALVINGS", 1)
  monkeypatch.setattr(tabular, "GAINS", (1.5,))
  compare_rules.main(["compare_rules", "--tables", f"--output={tmp_path}"])
  lossy = json.loads((tmp_path / "results.json").read_text())
  documents["lossy"] = lossy
  last = run("bench")[1].splitlines()[-1]
  assert json.loads(last) == documents["bench"]
  about = {"name": "x", "quick": False, "minutes": 1 / 3, "busy_cores": 0.1}
  documents["kept"] = reproduction.published(
    documents["bench"], "python scripts/bench.py", about, None
  )
  for document in documents.values():
    VALIDATOR.validate(document)
  shown = {name for _, name, _ in members(list(documents.values()))}
  assert shown == {n for s in objects(SCHEMA) for n in s["properties"]}
  [greedy] = documents["greedy"]["runs"]
  assert greedy["identity"]["share"] == 1
  [sampled] = documents["sampled"]["runs"]
  assert sampled["identity"] is sampled["acceptance"]["alpha"]["value"] is None
  del documents["kept"]  # what that adds may be left out
  del lossy["equal_length"][1:]
  seen = set()
  for document in documents.values():
    assert_refuses_faults(document | {"runs": document["runs"][:1]}, seen)
