"""--k=auto: what pays by the costs and the first rounds, 0 included."""

import json

import jax
import jax.numpy as jnp
import pytest

import programs
from specdec.benchmark import timing
from specdec.benchmark.decoder import Decoder
from specdec.drafters.heads.head_config import HeadConfig
from specdec.noise import row_keys
from specdec.roofline import hardware, prediction
from specdec.roofline.cost import Cost, Term
from specdec.roofline.round_cost import Round


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return programs.write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture
def costs(monkeypatch):
  """Passes and rounds take what the test says, by number of tokens."""
  found = {"slope": 0.0}

  def seconds(batch, tokens):
    return 1e-3 * (1 + found["slope"] * (batch * tokens - 1))

  def pass_timer(model, params, batch, tokens, *_):
    return lambda: seconds(batch, tokens)

  def round_timer(decoder, rows):
    return lambda: seconds(decoder.batch, decoder.num_nodes)

  programs.fake_machine(monkeypatch)
  monkeypatch.setattr(timing, "pass_timer", pass_timer)
  monkeypatch.setattr(timing, "round_timer", round_timer)
  return found


@pytest.fixture
def generate(target, tmp_path, capsys):
  def call(*arguments, prompt="abababababababab"):
    capsys.readouterr()
    programs.run(
      "generate",
      f"--target={target}",
      *([f"--prompt={prompt}"] if prompt else []),
      "--k=auto",
      "--drafter=lookup(min_ngram=1)",
      "--max_new_tokens=24",
      "--color=never",
      f"--calibration={tmp_path / 'calibration.json'}",
      *arguments,
    )
    return capsys.readouterr().out

  return call


def test_free_draft_tokens_are_taken_and_dear_ones_are_not(
  generate, costs, tmp_path
):
  printed = generate("--acceptance=synthetic(0.9)", "--most_k=4")
  assert (
    "k = 4, " in printed and "times autoregressive decoding expected" in printed
  )
  assert "speedup expected" in printed
  kept = json.loads((tmp_path / "calibration.json").read_text())
  assert len(kept["fits"]) == 1 and len(kept["overhead"]) == 1

  (tmp_path / "calibration.json").unlink()
  costs["slope"] = 1.0  # every token costs a pass
  printed = generate("--acceptance=synthetic(0.2)", "--most_k=4")
  assert "k = 0: no draft token pays here" in printed


def keys_of(key, rows=64):
  keys = row_keys(key, jnp.arange(rows))
  return set(map(tuple, jax.random.key_data(keys).tolist()))


def test_it_says_what_it_waits_for(generate, costs):
  with programs.waits() as waits:
    generate("--most_k=2")
  timing, probe = waits[:2]
  assert timing.startswith("timing this machine for --k=auto (kept in ")
  assert probe == "compiling k = 2 and trying it for 16 rounds"


def test_what_decides_k_has_not_seen_the_noise_that_writes(
  generate, costs, monkeypatch
):
  """Else rules with noise of their own are not lossless: the test of a k chosen
  by a pilot run in decode_distribution_test shows by how much."""
  keys = {"first_rounds": [], "decode": []}
  for name, used in keys.items():
    honest = getattr(Decoder, name)

    def spy(self, *args, honest=honest, used=used, **options):
      used.append(self.key)
      return honest(self, *args, **options)

    monkeypatch.setattr(Decoder, name, spy)
  generate("--acceptance=rejection", "--temperature=1", "--most_k=2")
  [pilot], writing = keys["first_rounds"], keys["decode"]
  assert writing
  for key in writing:
    assert not keys_of(pilot) & keys_of(key)


def test_explained_term_by_term(generate, costs):
  printed = generate("--explain", "--most_k=2")
  for words in ("tokens a round", "weights", "KV read", "round overhead"):
    assert words in printed


@pytest.mark.parametrize("seconds", [0.0, -0.0, 1.861e-15, -1e-12])
def test_what_rounds_to_nothing_is_explained_as_0(seconds):
  cost = Cost((Term("overhead", seconds=seconds or 1e-300),), seconds)
  lines = prediction.explain(Round((("target", 1, cost),), seconds))
  assert [line[-1] for line in lines] == ["0", "0", "0"]


def test_a_calibration_is_made_once(generate, costs, monkeypatch):
  generate("--most_k=2")

  def never(*_):
    raise AssertionError("timed again")

  monkeypatch.setattr(timing, "pass_timer", never)
  generate("--most_k=2")


def test_a_larger_batch_is_timed_anew(generate, costs, tmp_path):
  path = tmp_path / "calibration.json"
  generate("--most_k=2")
  first = json.loads(path.read_text())
  prompts = tmp_path / "p.jsonl"
  prompts.write_text('{"prompt": "abab"}\n' * 4)
  many = f"--prompt_file={prompts}", "--batch=4"
  generate(*many, "--most_k=2", prompt=None)
  second = json.loads(path.read_text())
  assert len(second["fits"]) == 1 and second["fits"] != first["fits"]
  path.write_text("{")
  with pytest.raises(SystemExit, match=r"calibration.json: .*delete it"):
    generate("--most_k=2")


def test_a_calibration_of_another_machine_is_refused(
  generate, costs, monkeypatch
):
  generate("--most_k=2")
  monkeypatch.setattr(hardware, "device_name", lambda: "another chip")
  with pytest.raises(SystemExit, match=r"no speed .* and this is another chip"):
    generate("--most_k=2")


def test_bench_chooses_for_every_batch(target, costs, tmp_path, capsys):
  programs.run(
    "bench",
    f"--target={target}",
    "--k=auto",
    "--most_k=2",
    "--batch=1,2",
    "--context=8",
    "--max_new_tokens=8",
    "--repeats=2",
    "--passes=1",
    "--limit=2",
    f"--calibration={tmp_path / 'c.json'}",
  )
  lines = capsys.readouterr().out.splitlines()
  document = json.loads(lines[-1])
  assert [run["batch"] for run in document["runs"]] == [1, 2]


def test_bench_calibrates_and_says_how_well(target, costs, tmp_path, capsys):
  given = [
    f"--target={target}", "--drafter=early_exit(1)", "--k=2", "--batch=2",
    "--context=8", "--max_new_tokens=8", "--repeats=2",
  ]  # fmt: skip
  path = tmp_path / "c.json"
  programs.run("bench", *given, f"--calibrate={path}")
  printed = capsys.readouterr().out
  assert "held out" in printed and "overhead of rounds" in printed
  assert len(json.loads(path.read_text())["fits"]) == 2
  with pytest.raises(SystemExit, match="calibration is of chains"):
    programs.run("bench", *given, f"--calibrate={path}", "--shape=chains(2)")


def test_bench_calibrates_what_has_few_heads(target, costs, tmp_path, capsys):
  drafter, path = tmp_path / "three.safetensors", tmp_path / "c.json"
  head_config = HeadConfig("medusa", num_layers=0, levels=3, width=8)
  programs.save_drafter(target, drafter, head_config)
  programs.run(
    "bench", f"--target={target}", f"--drafter=head({drafter})", "--k=1",
    "--context=8", "--max_new_tokens=8", "--repeats=2", f"--calibrate={path}",
  )  # fmt: skip
  [rounds] = json.loads(path.read_text())["overhead"].values()
  assert {k for _, k, *_ in rounds["times"]} == {0, 1}


@pytest.mark.parametrize(
  "name, options, sentence",
  [
    (
      "bench",
      ["--k=1", "--calibrate={folder}/c.json"],
      "prices rounds of one drafter",
    ),
    ("generate", ["--k=auto", "--most_k=2"], "give a number for k"),
  ],
)
def test_copies_ahead_of_a_drafter_are_not_priced(
  target, costs, tmp_path, name, options, sentence
):
  options = [option.format(folder=tmp_path) for option in options]
  drafter = tmp_path / "three.safetensors"
  head_config = HeadConfig("medusa", num_layers=0, levels=3, width=8)
  programs.save_drafter(target, drafter, head_config)
  with pytest.raises(SystemExit, match=sentence):
    programs.run(
      name, f"--target={target}", 
      f"--drafter=lookup(k=2) | head({drafter})",
      "--max_new_tokens=8", *options,
    )  # fmt: skip


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--most_k=0"], "--most_k=0"),
    (["--most_k=24"], "leave room in --max_new_tokens=24"),
    (["--drafter=early_exit(1)", "--shape=chains(2)"], "is of chains"),
    (["--calibration=/nowhere/at/all.json"], "there is no folder"),
  ],
)
def test_bad_input(generate, costs, arguments, sentence):
  with pytest.raises(SystemExit, match=sentence):
    generate(*arguments)


@pytest.mark.parametrize("text", ["abc", "4-2", "1,x", "", "Auto"])
def test_what_is_no_list_of_integers(text):
  with pytest.raises(SystemExit, match="no list of integers"):
    programs.run("generate", f"--k={text}")


def test_flags_of_auto_are_refused_with_a_number(target):
  for flag in ("--most_k=3", "--explain", "--calibration=c.json"):
    with pytest.raises(SystemExit, match="is for --k=auto"):
      programs.run("generate", f"--target={target}", "--k=2", flag)
