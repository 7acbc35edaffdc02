"""scripts/generate.py as its users meet it, on a tiny model written here."""

import json
import os
import re
import shutil
import time

import jax
import pytest

import programs
from programs import write_model
from specdec import checkpoints
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.compiled import memory_plan
from specdec.utils import terminal

LETTERS = [chr(i) for i in range(ord("a"), ord("z") + 1)]
CONFIG = "from ml_collections import ConfigDict\ndef get_config():\n  return "


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
  return write_model(tmp_path_factory.mktemp("draft"), seed=1, num_layers=1)


@pytest.fixture
def run(target):
  """Runs the script's main in this process with these flags."""

  def call(*arguments):
    programs.run("generate", f"--target={target}", *arguments)

  return call


def test_command_line_ends_with_a_table_and_json(target, tmp_path):
  out = tmp_path / "out.json"
  flags = [f"--target={target}", "--prompt=abcabcab", "--max_new_tokens=20"]
  flags += [f"--json={out}", "--color=always", "--compilation_cache="]
  trace = tmp_path / "trace"
  more = "--repeats=1", f"--profile={trace}"
  result = programs.launch("generate", *flags, *more)
  assert result.returncode == 0, result.stderr
  assert "same text as the baseline" in result.stdout
  assert [*trace.rglob("*.xplane.pb")]
  assert "\x1b[" in result.stdout
  document = json.loads(out.read_text())
  (prompt,) = document["prompts"]
  assert len(prompt["token_ids"]) == len(prompt["text"]) == 20
  [entry] = document["runs"]
  same = {"texts": 1, "same": 1, "differences": [], "share": 1.0}
  assert entry["identity"] == same
  assert entry["acceptance"]["emitted"] == 20
  assert len(entry["acceptance"]["prefix_acceptance"]) == 5
  assert entry["acceptance"]["tokens_per_pass"]["value"] >= 1
  for key in ("tokens_per_second", "baseline_tokens_per_second"):
    assert entry["speed"][key] > 0


def test_the_first_command_ends_in_what_to_try_next(capsys):
  """As the README has it, with shorter texts."""
  flags = "--target=python-11m", "--temperature=0.8", "--max_new_tokens=8"
  programs.run("generate", *flags, "--repeats=1")
  printed = capsys.readouterr().out
  assert printed.count("--- prompt ") == 3
  assert "same text as the baseline   yes" in printed
  assert "continues Python source" in printed
  assert printed.index("Next:") > printed.index("continues Python source")


def test_activations_that_overflow_end_in_a_sentence(target, tmp_path):
  """Every weight is finite, and no distribution is."""
  checkpoint = checkpoints.load(target)
  params = checkpoint.params
  huge = {"scale": params["final_norm"]["scale"] * 3e38}
  folder = tmp_path / "huge"
  shutil.copytree(target, folder)
  checkpoints.save_safetensors(
    folder, params | {"final_norm": huge}, checkpoint.config
  )
  with pytest.raises(SystemExit, match="target's probabilities are not finite"):
    programs.run("generate", f"--target={folder}", "--prompt=abc")


def test_texts_of_a_file_of_prompts_do_not_depend_on_the_batch(
  run, draft, tmp_path
):
  prompts, out = tmp_path / "p.jsonl", tmp_path / "o.json"
  entries = [
    {"prompt": "hello"},
    {"text": "a longer one"},
    {"turns": ["first", "second"]},
    {"token_ids": [1, 2, 3]},
    {"prompt": "x"},
  ]
  prompts.write_text("\n".join(map(json.dumps, entries)))
  common = [f"--prompt_file={prompts}", "--temperature=1", f"--json={out}"]
  common += ["--top_p=0.9", "--acceptance=coupled", "--repeats=1"]
  common += [f"--drafter=model({draft})", "--k=3", "--max_new_tokens=12"]
  run(*common, "--batch=2")
  document = json.loads(out.read_text())
  assert [len(p["token_ids"]) for p in document["prompts"]] == [12] * 5
  assert document["runs"][0]["identity"]["share"] == 1
  run(*common, "--batch=5")
  assert json.loads(out.read_text())["prompts"] == document["prompts"]


def test_html_holds_every_prompt_and_a_config_sets_flags_that_are_not_given(
  run, target, draft, tmp_path, capsys
):
  prompts, out = tmp_path / "p.jsonl", tmp_path / "o.json"
  prompts.write_text('{"prompt": "hello"}\n{"prompt": "x"}\n')
  html, config = tmp_path / "page.html", tmp_path / "config.py"
  config.write_text(f"{CONFIG}ConfigDict({{'k': 2, 'max_new_tokens': 12}})")
  arguments = [f"--prompt_file={prompts}", f"--html={html}", f"--json={out}"]
  arguments += [f"--drafter=model({draft})", "--temperature=1", "--k=3"]
  run(*arguments, "--acceptance=rejection", f"--config={config}")
  text = html.read_text()
  assert text.count("<section>") == 2
  assert len(re.findall(r'class="t [a-z]+" tabindex', text)) == 24
  [entry] = json.loads(out.read_text())["runs"]
  assert entry["identity"] is None  # its noise is not the baseline's
  passes = entry["acceptance"]["target_passes"]
  assert text.count('<span class="round">') == passes
  shares = [float(s) for s in re.findall(r'"value">([-.\de]+)<', text)]
  assert len(shares) > 24 and all(0 <= share <= 1 for share in shares)
  printed = capsys.readouterr()
  rows = re.findall(r"^  (\w.*?)   +(.*)$", printed.out, re.MULTILINE)
  assert len(rows) == 11
  for name, value in rows:
    assert f'<th scope="row">{name}</th><td>{value}</td>' in text
  # k is given, so the config has no say in it.
  for value in (target, f"model({draft})", "rejection", "3", "1", "0"):
    assert f"<dd>{value}</dd>" in text
  compiled = r"^compiling \(kept .*\) \.\.\. \d+\.\d s$"
  assert re.search(compiled, printed.err, re.M)


def test_pairs_are_timed_in_turns_and_give_a_standard_error(
  run, tmp_path, monkeypatch, capsys
):
  calls, complete = [], Decoder.complete

  def timed(self, batch, strict):
    baseline = self.num_nodes == 1
    calls.append((list(batch.numbers), baseline))
    seconds = [0.5, 0.5, 1.0, 0.25][len(calls) // 2 % 4]
    seconds *= 3 if baseline else 1
    return complete(self, batch, strict)._replace(seconds=seconds)

  monkeypatch.setattr(Decoder, "complete", timed)
  out = tmp_path / "out.json"
  run("--prompt=abc", "--max_new_tokens=8", f"--json={out}")
  assert calls == [
    ([0], baseline) for baseline in (False, True, True, False, False, True)
  ]
  [entry] = json.loads(out.read_text())["runs"]
  speed = entry["speed"]
  assert speed["tokens"] == speed["baseline_tokens"] == 3 * 8
  assert speed["speedup"]["error"] > 0
  table = capsys.readouterr().out
  assert re.search(r"speedup +\d+\.\d\d ± \d+\.\d\d x", table)
  # Several batches are one pair each, as long as there are enough.
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"prompt": "hello"}\n' * 4)
  calls.clear()
  run(f"--prompt_file={prompts}", "--max_new_tokens=8", f"--json={out}")
  assert [numbers for numbers, _ in calls] == [[i // 2] for i in range(8)]
  [entry] = json.loads(out.read_text())["runs"]
  assert entry["acceptance"]["emitted"] == 4 * 8


def test_progress_shows_seconds_meanwhile_and_at_the_end(capsys):
  with terminal.progress("compiling x", every=0.01):
    time.sleep(0.1)
  first, *middle, last = capsys.readouterr().err.splitlines()
  assert first == "compiling x ..."
  assert middle and all(line.endswith(" s so far") for line in middle)
  assert re.fullmatch(r"compiling x \.\.\. 0\.\d s", last)
  with pytest.raises(ValueError), terminal.progress("compiling y"):
    raise ValueError
  assert capsys.readouterr().err == "compiling y ...\n"  # and no time of it


def test_stop_string_cuts_both_ways_alike(run, tmp_path):
  out = tmp_path / "o.json"
  common = ["--prompt=abab", "--max_new_tokens=40", f"--json={out}"]
  run(*common, "--repeats=1")
  whole = json.loads(out.read_text())["prompts"][0]["text"]
  stop = whole[9:12]
  run(*common, f"--stop={stop}", "--stop=never there", "--repeats=1")
  document = json.loads(out.read_text())
  assert document["prompts"][0]["text"] == whole[: whole.index(stop)]
  assert document["runs"][0]["identity"]["share"] == 1


@pytest.mark.parametrize(
  "source, sentence",
  [
    ("get_config = 1", "TypeError: 'int' object is not callable"),
    ("nonsense", "NameError: name 'nonsense' is not defined"),
    ("def get_config(): return None", "gives a NoneType; it must be a"),
  ]
  + [
    (f"{CONFIG}ConfigDict({{{name!r}: {value!r}}})", sentence)
    for name, value, sentence in (
      ("acceptance", "nonsense", "nonsense; known: block"),
      ("k", 2.5, "k = 2.5: 2.5 is no integer and no list"),
      ("drafter", 3, "drafter = 3: it must be a text"),
      ("max_new_tokens", "x", "max_new_tokens = 'x': invalid literal"),
      ("max_new_tokens", 10**30, "max_new_tokens = 10+; it must be in"),
      ("temperature", [1], r"temperature = \[1\]: "),
      ("temperatur", 1, r"sets 'temperatur'; did you mean temperature"),
    )
  ],
)
def test_config_files_that_cannot_be_used(run, tmp_path, source, sentence):
  path = tmp_path / "config.py"
  path.write_text(source)
  with pytest.raises(SystemExit, match=sentence) as ended:
    run(f"--config={path}", "--prompt=a")
  assert "\n" not in str(ended.value)


@pytest.mark.parametrize(
  "letters, sentence",
  [
    ([*LETTERS, "_"], "token 26 is ' ' in one and '_'"),
    (LETTERS, "27 token ids and the draft 26"),
  ],
)
def test_b23_unlike_vocabularies_are_refused(run, tmp_path, letters, sentence):
  draft = write_model(tmp_path / "draft", letters=letters)
  with pytest.raises(SystemExit, match=sentence):
    run(f"--drafter=model({draft})", "--prompt=ab")


def test_an_unwritable_file_is_refused_at_once(run, tmp_path, monkeypatch):
  monkeypatch.setattr(os, "access", lambda *_: False)
  monkeypatch.setattr(
    checkpoints, "inspect", lambda *_: pytest.fail("read the model first")
  )
  with pytest.raises(SystemExit, match=r"--html=.*out cannot be written"):
    run("--prompt=a", f"--html={tmp_path / 'out'}")


def test_weights_that_are_loaded_are_not_asked_for_again(target, monkeypatch):
  plans = []
  check = memory_plan.check
  monkeypatch.setattr(
    memory_plan, "check", lambda plan, *_: plans.append(plan) or check(plan)
  )
  setup = Setup(str(target), max_new_tokens=4)
  loaded_target = setup.load_target()
  setup.check_memory(loaded_target, setup.decoder(loaded_target))
  before, after = plans
  loaded = {"target", "allocator"}
  assert set(before.parts) - set(after.parts) == loaded
  # What was free, less the weights, holds the rest.
  left = before.needed - 1.1 * sum(before.parts[name] for name in loaded)
  monkeypatch.setattr(memory_plan, "available", lambda *_: int(left) + 1)
  check(after)


EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no 9 GiB\nmore")


@pytest.mark.parametrize(
  "error, sentence, backend",
  [
    (EXHAUSTED, "no 9 G", "gpu"),
    (MemoryError(), "no more could be allocated", "cpu"),
  ],
)
def test_an_allocator_that_gives_up_is_one_sentence(
  run, monkeypatch, error, sentence, backend
):
  def fail(*_):
    raise error

  monkeypatch.setattr(Setup, "load_target", fail)
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  with pytest.raises(SystemExit) as ended:
    run("--prompt=a")
  ending = ended.value.code
  assert ("bfloat16" in ending) == (backend == "gpu")
  assert re.search(rf"out of memory \(.*{sentence}.*\); take a", ending)
  assert "\n" not in ending
