"""The program choose_layers on a tiny model."""

import json
import sys

import pytest

import programs
from specdec import noise
from specdec.benchmark import skip_search, timing
from specdec.benchmark.setup import Setup
from specdec.types import Skip


@pytest.fixture(autouse=True)
def fake_machine(monkeypatch):
  programs.fake_machine(monkeypatch)
  monkeypatch.setattr(timing, "forget_programs", lambda: None)


@pytest.fixture
def choose(target, tmp_path):
  def call(*arguments):
    programs.run(
      "choose_layers",
      f"--target={target}",
      f"--output={tmp_path / 'out'}",
      *("--max_new_tokens=8", "--context=8", "--samples=2", "--timings=1"),
      *arguments,
    )
    return json.loads((tmp_path / "out" / "skip.json").read_text())

  return call


@pytest.fixture
def asked(monkeypatch):
  """Compiles nothing: a subset is worth its size; what was asked for."""
  asked = []

  def value(self, skip, k):
    asked.append((skip, k))
    rate = 1.0 + len(skip.attention) - len(skip.mlp)
    return skip_search.Value(rate, 2.0, 3.0)

  bench = skip_search.SkipBench
  monkeypatch.setattr(bench, "value", value)
  monkeypatch.setattr(bench, "against_baseline", lambda *_: (3.0, 2.0))
  return asked


def test_the_real_loop_decides_and_generate_takes_the_answer(
  choose, target, tmp_path, capsys
):
  with programs.waits() as waits:
    document = choose("--trials=2")
  assert "compiling k = 3 without 0 attention and 0 MLP layers" in waits
  assert [t["skip_mlp"] for t in document["trials"]] == [[], [1]]
  nothing, other = document["trials"]
  assert nothing["tokens_per_round"] == 4.0  # all draft tokens are its own
  assert nothing["drafted_per_round"] == other["drafted_per_round"] == 3.0
  best = max(document["trials"], key=lambda t: t["tokens_per_second"])
  assert {name: document[name] for name in best} == best
  assert document["speedup"] > 0
  printed = capsys.readouterr().out
  assert "tokens/pass" in printed and "in turns" in printed
  drafter = f"layer_skip({tmp_path / 'out' / 'skip.json'})"
  assert f"use it: --drafter='{drafter}'" in printed
  programs.run(
    "generate",
    *(f"--target={target}", f"--drafter={drafter}", "--prompt=abc"),
    *("--max_new_tokens=8", f"--json={tmp_path / 'g.json'}"),
  )
  [run] = json.loads((tmp_path / "g.json").read_text())["runs"]
  assert run["k"] == 3
  assert "same text as the baseline   yes" in capsys.readouterr().out


def test_it_has_not_seen_the_noise_that_writes_the_text(target):
  """Of drafts that a search had chosen by it, the text's law is another."""
  setup = Setup(
    target=str(target),
    temperature=1.0,
    prompt_size=4,
    max_new_tokens=4,
    drafter="layer_skip(mlp=[0])",
  )
  loaded, rows = setup.load_target(), [[1, 2, 3, 4]]
  writes = setup.decoder(loaded).key
  search = skip_search.SkipBench(setup, loaded, rows)
  for way in search._bench.ways(setup, rows, "a way").values():
    assert way.key == noise.pilot_key(writes) != writes


def test_it_goes_on_where_it_was_killed(choose, asked, monkeypatch):
  value = skip_search.SkipBench.value

  def killed(self, skip, k):
    result = value(self, skip, k)
    if len(asked) == 3:
      raise KeyboardInterrupt
    return result

  with monkeypatch.context() as patch:
    patch.setattr(skip_search.SkipBench, "value", killed)
    with pytest.raises(SystemExit, match="goes on from here"):
      choose("--trials=10", "--k=2,3")
  assert len(asked) == 3
  document = choose("--trials=10", "--k=2,3")
  assert len(document["trials"]) == 10
  # Two were worth keeping; the one that was cut is asked again, no other is.
  assert asked.count(asked[2]) == 2
  assert all(asked.count(one) == 1 for one in asked if one != asked[2])
  again = choose("--trials=11", "--k=2,3")
  assert again["trials"][:10] == document["trials"]
  assert len(again["trials"]) == 11
  with pytest.raises(SystemExit, match=r"other settings .*seed: 0 -> 1"):
    choose("--trials=11", "--k=2,3", "--seed=1")


def test_it_does_not_go_on_with_other_texts(choose, asked, tmp_path):
  file = tmp_path / "prompts.jsonl"
  flags = f"--prompt_file={file}", "--samples=1", "--k=2"
  file.write_text('{"prompt": "abcdefghijklmn"}\n')
  choose("--trials=2", *flags)
  choose("--trials=3", *flags)
  file.write_text('{"prompt": "nmlkjihgfedcba"}\n')
  with pytest.raises(SystemExit, match=r"other settings .*prompt_checksum"):
    choose("--trials=4", *flags)


def test_it_finds_what_is_worth_most(choose, asked):
  first = "--first=layer_skip(attention=[0])"
  document = choose("--trials=18", first, "--exit_threshold=0.5")
  assert asked[0] == (Skip((0,), ()), 3)  # what was given comes first
  assert document["skip_attention"] == [0, 1] and document["skip_mlp"] == []
  assert document["exit_threshold"] == 0.5
  assert len(asked) == len(set(asked)) <= 16 < len(document["trials"])


def test_a_chip_that_is_not_here_can_be_chosen_for(choose, monkeypatch):
  bench = skip_search.SkipBench
  monkeypatch.setattr(bench, "against_baseline", lambda *_: (3.0, 2.0))
  document = choose(
    "--trials=2", "--objective=predicted", "--for_chip=v5e", "--k=1"
  )
  nothing, other = document["trials"]
  assert nothing["tokens_per_round"] == 2.0
  assert nothing["tokens_per_second"] != other["tokens_per_second"]
  assert document["objective"] == "predicted"


def test_without_optuna_it_names_the_extra(choose, monkeypatch):
  monkeypatch.setitem(sys.modules, "optuna", None)
  with pytest.raises(SystemExit, match=r"pip install -e '\.\[search\]'"):
    choose()


@pytest.mark.parametrize(
  ("drafter", "sentence"),
  [
    ("layer_skip(nowhere.json)", "nowhere.json"),
    ("layer_skip({empty})", "skip_attention, skip_mlp and k"),
    ("layer_skip({full}, mlp=[1])", "or attention and mlp"),
  ],
)
def test_a_file_of_layers_is_whole_and_alone(tmp_path, drafter, sentence):
  empty, full = tmp_path / "empty.json", tmp_path / "full.json"
  empty.write_text("{}")
  full.write_text('{"skip_attention": [], "skip_mlp": [0], "k": 2}')
  with pytest.raises((ValueError, OSError), match=sentence):
    Setup(drafter=drafter.format(empty=empty, full=full)).check_sources()
