"""scripts/bench.py as its users meet it, on tiny models."""

import contextlib
import dataclasses
import itertools
import json
import types

import pytest

import closed_form
import programs
from specdec import checkpoints
from specdec.benchmark import points, rows, runs, timing
from specdec.benchmark.setup import Setup
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import fetch
from specdec.compiled import memory_plan
from specdec.models import presets


@pytest.fixture(autouse=True)
def fake_hardware(monkeypatch):
  programs.fake_machine(monkeypatch)


@pytest.fixture
def bench(target, capsys):
  def call(*arguments):
    capsys.readouterr()
    given = [f"--target={target}", *arguments]
    programs.run("bench", *given, "--repeats=2", "--context=8")
    return capsys.readouterr().out.splitlines()

  return call


def test_tables_then_one_document_on_the_last_line(bench):
  arguments = ["--passes=1,3", "--batch=1,2", "--k=2", "--limit=4"]
  drafter = "--drafter=early_exit(1)"
  lines = bench(*arguments, drafter, "--max_new_tokens=12")
  document = json.loads(lines[-1])
  passes = [(e["batch"], e["tokens"]) for e in document["passes"]]
  assert passes == [(1, 1), (1, 3), (2, 1), (2, 3)]
  runs = [(run["batch"], run["k"]) for run in document["runs"]]
  assert runs == [(1, 2), (2, 2)]
  assert document["impossible"] == []
  for run in document["runs"]:
    assert run["memory"] > 0 and run["baseline_memory"] > 0
    assert run["acceptance"]["emitted"] == 12 * run["acceptance"]["texts"]
    assert run["acceptance"]["texts"] == 4
    assert run["prompts"].startswith("4 functions of the Python standard")
    assert run["least_baseline_round_seconds"] > 0
    assert run["identity"]["share"] == 1
    assert run["compile"]["programs"] >= 2
    speed = run["speed"]
    assert speed["tokens"] == 4 * 12  # every batch once: two pairs or more
    assert speed["tokens"] / speed["seconds"] == speed["tokens_per_second"]
    assert speed["speedup"]["error"] > 0
  assert document["bandwidth"] > 0
  text = "\n".join(lines[:-1])
  assert "decoding, early_exit(1), coupled" in text
  assert "2 x 3" in text and "1 x 2" in text
  assert "functions of the Python standard library" in text


def test_numbers_and_lengths_take_turns_with_one_baseline(bench, monkeypatch):
  compare, compared = runs.compare, []

  def watched(decoders, batches, *arguments, **options):
    compared.append([*decoders])
    return compare(decoders, batches, *arguments, **options)

  monkeypatch.setattr(runs, "compare", watched)
  entropy = "entropy(limit=0.4)"
  arguments = ["--drafter=early_exit(1)", "--passes=1", "--batch=1,2"]
  arguments += ["--k=1,2", "--limit=2", "--most_k=3"]
  lines = bench(*arguments, f"--length={entropy}", "--max_new_tokens=10")
  every = ["k = 1", "k = 2", entropy, "baseline"]
  assert compared == [every] * 4  # for each batch size warm up, then the clock
  entries = json.loads(lines[-1])["runs"]
  assert [(x["batch"], x["k"], x.get("length")) for x in entries] == [
    (batch, *way)
    for batch in (1, 2)
    for way in ((1, None), (2, None), (3, entropy))
  ]
  of_batch = {x["batch"]: x["speed"]["baseline_seconds"] for x in entries}
  for run in entries:
    assert run["speed"]["baseline_seconds"] == of_batch[run["batch"]]
    assert run["speed"]["seconds"] > 0
  assert len({run["speed"]["seconds"] for run in entries}) == len(entries)
  assert any(f"2 x {entropy}" in line for line in lines)


def test_one_batch_is_timed_by_medians_profiled_and_late_compiling_marked(
  bench, tmp_path, monkeypatch
):
  late = timing.Compilations(1, 0.0)
  monkeypatch.setattr(
    timing, "compilations", lambda: contextlib.nullcontext(late)
  )
  prompts = tmp_path / "two.jsonl"
  prompts.write_text(2 * '{"prompt": "hello hello"}\n')
  arguments = [f"--prompt_file={prompts}", f"--profile={tmp_path}", "--k=1"]
  lines = bench(*arguments, "--passes=1", "--batch=2", "--max_new_tokens=6")
  assert list(tmp_path.rglob("*.xplane.pb"))
  [run] = json.loads(lines[-1])["runs"]
  assert run["speed"]["seconds"] == run["seconds"]["median"]
  assert run["speed"]["baseline_seconds"] == run["baseline_seconds"]["median"]
  assert run["seconds"]["repeats"] == 2
  assert run["prompts"].startswith(f"2 prompts of {prompts}")
  assert run["warnings"] == ["1 programs compiled while batch 2 x 1 was timed"]
  assert f"  * warning: {run['warnings'][0]}" in lines


def test_the_shipped_target_is_benched_on_all_shipped_prompts():
  target = types.SimpleNamespace(
    tokenizer=checkpoints.load_tokenizer(fetch(shipped.TARGET)),
    config=checkpoints.inspect(fetch(shipped.TARGET), "float32"),
    source=str(fetch(shipped.TARGET)),
  )
  source = rows.Source(target)
  one = rows.make_batches(source, 1, 128, 0)
  texts = [json.loads(x)["prompt"] for x in shipped.PROMPTS.open()]
  assert len(texts) == len(one.batches) == 32
  for ([ids], _), text in zip(one.batches, texts):
    assert text.endswith(target.tokenizer.decode(ids))
    assert text.endswith("):") and 80 < len(ids) <= 128
  assert one.shortest < 128
  description = "32 held-out functions of the Python standard"
  assert one.description.startswith(description)
  sixes = rows.make_batches(source, 6, 128, 0)
  assert [len(some.rows) for some in sixes.batches] == [6] * 5
  assert sixes.description.startswith("30 held-out functions")
  assert len(rows.make_batches(source, 4, 128, limit=3).batches) == 1
  for batch, size in ((1, 200), (40, 128)):  # longer, or more than there are
    slices = rows.make_batches(source, batch, size, 0)
    assert {len(x) for some in slices.batches for x in some.rows} == {size}
    count = max(batch, 32)
    assert slices.description.startswith(f"{count} slices of the Python")


def test_random_presets_with_synthetic_acceptance_say_so(capsys, monkeypatch):
  shape = presets.get("smollm2-135m")
  small = dataclasses.replace(
    shape, num_layers=1, width=16, mlp_width=16, vocab_size=300
  )
  monkeypatch.setattr(presets, "get", lambda name, dtype: small)
  arguments = ["--target=preset:smollm2-135m", "--random_weights", "--k=0,3"]
  arguments += ["--acceptance=synthetic(1)", "--max_new_tokens=8"]
  lengths = ["--passes=1", "--repeats=2", "--context=8"]
  programs.run("bench", *arguments, *lengths)
  out = capsys.readouterr().out
  document = json.loads(out.splitlines()[-1])
  assert len(document["caveats"]) == 2
  for caveat in document["caveats"]:
    assert f"warning: {caveat}" in out
  assert all(run["identity"] is None for run in document["runs"])
  passes = [run["acceptance"]["target_passes"] for run in document["runs"]]
  assert passes == [8, 2]  # 8 tokens, all accepted


@pytest.mark.parametrize("share", [0.986, 0.8, 0.4])
def test_a_time_under_its_bytes_is_marked_and_a_gross_one_ends_the_run(
  bench, target, tmp_path, capsys, monkeypatch, share
):
  """Every pass takes this share of the time that its bytes take."""
  config = checkpoints.inspect(target, "float32")

  def pass_timer(model, params, batch, tokens, context, *_):
    size = closed_form.pass_bytes(config, batch, tokens, context)
    return lambda: share * size / 1e15

  monkeypatch.setattr(timing, "pass_timer", pass_timer)
  out, marked = tmp_path / "out.json", share < 0.95
  gross = pytest.raises(SystemExit, match="measured wrongly")
  with gross if share < 0.5 else contextlib.nullcontext():
    print(*bench("--passes=1,3", "--nodecode", f"--json={out}"), sep="\n")
  document = json.loads(out.read_text())
  *lines, last = capsys.readouterr().out.splitlines()
  assert json.loads(last) == document
  warnings = [entry["warnings"] for entry in document["passes"]]
  assert [*map(len, warnings)] == [marked, marked]
  assert document["impossible"] == [*itertools.chain(*warnings)]
  text = "\n".join(lines)
  assert ("1 x 3 *" in text) == marked
  assert ("* warning: a pass of 1 x 3 tokens took" in text) == marked


def test_caches_of_passes_that_do_not_fit_are_refused(monkeypatch):
  setup = Setup(max_new_tokens=8)
  target = setup.load_target()
  monkeypatch.setattr(timing, "pass_timer", lambda *_: pytest.fail("compiled"))
  # One cache of the two would fit.
  one = memory_plan.cache_bytes(target.checkpoint.config, 1, 4096)
  monkeypatch.setattr(memory_plan, "available", lambda _: int(1.5 * one))
  with pytest.raises(MemoryError, match="KV caches of passes"):
    points.time_passes(setup, target, [1, 8], 64, 2, slots=(4096, 4096))
