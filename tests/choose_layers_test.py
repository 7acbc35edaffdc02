"""scripts/choose_layers.py as its users meet it, on a tiny model."""

import importlib
import json
import sys

import pytest

import programs
from specdec.types import Skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return programs.write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def known_hardware(monkeypatch):
  programs.fake_machine(monkeypatch)


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
def script():
  return importlib.import_module("choose_layers")


def of_parts(script, monkeypatch):
  """Compiles nothing: a subset is worth its size; what was asked for."""
  asked = []

  def value(self, skip, k):
    asked.append((skip, k))
    if len(asked) == of_parts.fails_at:
      raise KeyboardInterrupt
    return script.Found(1.0 + len(skip.attention) - len(skip.mlp), 2.0, 3.0)

  monkeypatch.setattr(script.Texts, "value", value)
  monkeypatch.setattr(script.Texts, "against_baseline", lambda *_: (3.0, 2.0))
  return asked


of_parts.fails_at = None


def test_the_real_loop_decides_and_generate_takes_the_answer(
  choose, target, tmp_path, capsys
):
  with programs.waits() as waits:
    found = choose("--trials=2")
  assert "compiling k = 3 without 0 attention and 0 MLP layers" in waits
  assert [t["skip_mlp"] for t in found["trials"]] == [[], [1]]
  nothing, other = found["trials"]
  assert nothing["tokens_per_round"] == 4.0  # all draft tokens are its own
  assert nothing["drafted_per_round"] == other["drafted_per_round"] == 3.0
  best = max(found["trials"], key=lambda t: t["tokens_per_second"])
  assert {name: found[name] for name in best} == best
  assert found["speedup"] > 0
  printed = capsys.readouterr().out
  assert "tokens/round" in printed and "in turns" in printed
  path = tmp_path / "out" / "skip.json"
  programs.run(
    "generate",
    *(f"--target={target}", f"--skip={path}", "--prompt=abc"),
    *("--max_new_tokens=8", f"--json={tmp_path / 'g.json'}"),
  )
  settings = json.loads((tmp_path / "g.json").read_text())["settings"]
  assert settings["drafter"] == "layer_skip" and settings["k"] == [3]
  assert settings["skip_mlp"] == found["skip_mlp"]
  assert "same text as plain        yes" in capsys.readouterr().out


def test_it_goes_on_where_it_was_killed(choose, script, monkeypatch):
  asked = of_parts(script, monkeypatch)
  monkeypatch.setattr(of_parts, "fails_at", 3)
  with pytest.raises(SystemExit, match="goes on from here"):
    choose("--trials=12", "--k=2,3")
  assert len(asked) == 3
  monkeypatch.setattr(of_parts, "fails_at", None)
  found = choose("--trials=12", "--k=2,3")
  assert len(found["trials"]) == 12
  # Two were worth keeping; the one that was cut is asked again, no other is.
  assert asked.count(asked[2]) == 2
  assert all(asked.count(one) == 1 for one in asked if one != asked[2])
  again = choose("--trials=12", "--k=2,3")
  assert again["trials"] == found["trials"] and len(asked) <= 13
  assert len(choose("--trials=14", "--k=2,3")["trials"]) == 14
  with pytest.raises(SystemExit, match=r"other settings .*seed: 0 -> 1"):
    choose("--trials=14", "--k=2,3", "--seed=1")


def test_it_finds_what_is_worth_most(choose, script, monkeypatch):
  asked = of_parts(script, monkeypatch)
  found = choose("--trials=30", "--skip_attention=0", "--exit_threshold=0.5")
  assert asked[0] == (Skip((0,), ()), 3)  # what was given comes first
  assert found["skip_attention"] == [0, 1] and found["skip_mlp"] == []
  assert found["exit_threshold"] == 0.5
  assert len(asked) == len(set(asked)) <= 16 < len(found["trials"])


def test_a_chip_that_is_not_here_can_be_chosen_for(choose):
  found = choose(
    "--trials=2", "--objective=predicted", "--for_chip=v5e", "--k=1"
  )
  nothing, other = found["trials"]
  assert nothing["tokens_per_round"] == 2.0
  assert nothing["tokens_per_second"] != other["tokens_per_second"]
  assert found["speedup"] > 0 and found["objective"] == "predicted"


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--output="], "give --output"),
    (["--trials=0"], "--trials=0; it must be >= 1"),
    (["--samples=0"], "--samples=0; it must be >= 1"),
    (["--drafter=lookup"], "layer_skip is what is chosen"),
    (["--shape=chains:2"], "it is searched with chains"),
    (["--for_chip=v5e"], "is for --objective=predicted"),
    (["--objective=predicted", "--for_chip=x9"], "x9"),
    (["--skip_mlp=2"], "names layer 2; this target has 2 layers"),
  ],
)
def test_bad_input_ends_with_one_sentence(choose, arguments, sentence):
  with pytest.raises(SystemExit, match=sentence) as ended:
    choose(*arguments)
  assert "\n" not in str(ended.value)


def test_without_optuna_it_names_the_extra(choose, monkeypatch):
  monkeypatch.setitem(sys.modules, "optuna", None)
  with pytest.raises(SystemExit, match=r"pip install -e '\.\[search\]'"):
    choose()


@pytest.mark.parametrize(
  ("arguments", "sentence"),
  [
    (["--drafter=layer_skip"], "goes together with what it leaves out"),
    (["--drafter=lookup", "--skip_mlp=1"], "goes together with what it"),
    (["--skip_attention=2"], "skip.attention names layer 2.*in 0..1"),
    (["--skip_attention=x"], "'x' is no list of integers"),
    (["--exit_threshold=0.5"], "is for chains of --drafter=layer_skip"),
    (["--skip_mlp=1", "--exit_threshold=2"], "it must be in 0..1"),
    (["--skip_mlp=1", "--exit_threshold=.5", "--k=auto"], "so does k=auto"),
    (["--skip_mlp=1", "--shape=dynamic:2", "--k=4"], "with layer_skip keep"),
    (["--skip=nowhere.json"], "nowhere.json"),
    (["--skip={empty}"], "has no skip_attention, skip_mlp and k"),
    (["--skip={empty}", "--skip_mlp=1"], "what --skip_attention and"),
  ],
)
def test_generate_refuses_what_cannot_be_skipped(
  target, tmp_path, arguments, sentence
):
  empty = tmp_path / "empty.json"
  empty.write_text("{}")
  arguments = [text.format(empty=empty) for text in arguments]
  with pytest.raises((SystemExit, Exception), match=sentence):
    programs.run("generate", f"--target={target}", "--prompt=ab", *arguments)
