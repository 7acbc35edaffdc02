"""Tokenizer, target, draft, conversion: one program after another."""

import json
import re

import jax
import numpy as np
import pytest

import programs
from specdec import checkpoints
from tiny_training import run_killed, write_config

MODEL = dict(
  vocab_size=300,
  num_layers=1,
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  tied=True,
)
OPTIONS = dict(
  steps=20,
  batch=4,
  sequence=16,
  warmup=2,
  log_every=1,
  eval_every=10,
  save_every=5,
  eval_sequences=4,
)

DECODING = dict(k=2, prompts=4, length=8, new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with text, a tokenizer and the config of a target."""
  folder = tmp_path_factory.mktemp("place")
  (folder / "text").mkdir()
  for name in "abc":
    lines = [f"def {name}{i}(x):\n  return x + {i % 7}\n\n" for i in range(150)]
    (folder / "text" / f"{name}.py").write_text("".join(lines))
  programs.run(
    "train_tokenizer",
    f"--data={folder / 'text'}",
    "--vocab_size=300",
    f"--output={folder / 'tokenizer'}",
  )
  assert checkpoints.load_tokenizer(folder / "tokenizer").vocab_size == 300
  return folder


def entries(place, **changes):
  shared = dict(
    tokenizer=str(place / "tokenizer"),
    data=str(place / "text"),
    held_out=str(place / "text" / "c.py"),
    model=MODEL,
    options=OPTIONS,
  )
  return shared | changes


@pytest.fixture(scope="module")
def target(place):
  config = write_config(place / "target.py", **entries(place))
  programs.run("train", config, f"--folder={place / 'target'}")
  return place / "target" / "best"


def test_distils_a_draft_that_generate_can_use(place, target, capsys):
  config = write_config(
    place / "draft.py",
    **entries(
      place,
      target=str(target),
      loss="forward_kl",
      samples=dict(count=40, prompt=4, temperature=1.0),
      decoding=DECODING,
    ),
  )
  programs.run("train", config, f"--folder={place / 'draft'}")
  errors = capsys.readouterr().err
  assert "sampling" in errors and "tokens_per_pass" in errors
  assert "step 20: held-out" in errors
  lines = (place / "draft" / "metrics.jsonl").read_text().splitlines()
  decoded = [json.loads(x) for x in lines if '"decoding"' in x]
  assert [x["step"] for x in decoded] == [10, 20]
  programs.run(
    "generate",
    f"--target={target}",
    f"--drafter=model({place / 'draft' / 'last'})",
    "--prompt=def a1(x):",
    "--max_new_tokens=12",
  )
  assert re.search(r"same text as the baseline +yes", capsys.readouterr().out)


def test_converts_there_and_back(place, target):

  def convert(source, name, *flags):
    output = f"--output={place / name}"
    programs.run("convert", f"--source={source}", output, *flags)

  convert(target, "orbax", "--layout=orbax")
  convert(place / "orbax", "back")
  first, last = (checkpoints.load(x) for x in (target, place / "back"))
  assert first.config == last.config
  jax.tree.map(np.testing.assert_array_equal, first.params, last.params)
  assert first.tokenizer.tokens == last.tokenizer.tokens
  assert first.eos_ids == last.eos_ids == (0,)
  convert(target, "half", "--dtype=float16")
  half = checkpoints.load(place / "half")
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a.astype(np.float16), b),
    first.params,
    half.params,
  )
  with pytest.raises(SystemExit, match="is not empty"):
    convert(target, "half")


@pytest.mark.parametrize(
  "changes, complaint",
  [
    (dict(data="{place}/absent"), "does not exist"),
    (dict(options=OPTIONS | dict(sequence=99999)), "one sequence takes 100000"),
    (dict(speed="high"), "the config sets speed; accepted: tokenizer, "),
    (dict(model=MODEL | dict(num_layers=10**9)), "num_layers = 1,000,000,000"),
    (
      dict(target="{place}/other", loss="forward_kl", decoding=DECODING),
      "different vocabularies: token ",
    ),
    (dict(loss="total_variation"), "'total_variation' needs a target"),
    (dict(target="{place}/target/best"), "lacks decoding, loss"),
    (
      dict(start="{place}/target/best", model=MODEL | dict(width=32)),
      "width: 16",
    ),
    (dict(model=MODEL | dict(dtype="bfloat16")), "trained in float32"),
  ],
)
def test_refuses_before_it_begins(place, target, changes, complaint):
  if "other" in str(changes):
    _other_words(place, target)
  changes = json.loads(json.dumps(changes).replace("{place}", str(place)))
  config = write_config(place / "bad.py", **entries(place, **changes))
  with pytest.raises(SystemExit, match=re.escape(complaint)):
    programs.run("train", config, f"--folder={place / 'bad'}")
  assert not (place / "bad").exists()


def _other_words(place, target):
  """The target again, with two tokens of its vocabulary exchanged."""
  model = checkpoints.load(target)
  checkpoints.save_safetensors(place / "other", model.params, model.config)
  model.tokenizer.save(place / "other")
  path = place / "other" / "tokenizer.json"
  content = json.loads(path.read_text())
  words = content["model"]["vocab"]
  words["a"], words["b"] = words["b"], words["a"]
  path.write_text(json.dumps(content))


def test_another_config_in_the_same_folder(place, target):
  changed = entries(place, options=OPTIONS | dict(learning_rate=0.5))
  config = write_config(place / "changed.py", **changed)
  change = r"options\.learning_rate: 0\.001 -> 0\.5"
  with pytest.raises(SystemExit, match=change):
    programs.run("train", config, f"--folder={place / 'target'}")


@pytest.mark.parametrize(
  "flags, sentence",
  [
    ([], "give --folder, a folder"),
    (["--time_steps=1", "--folder=x"], "--folder has no effect with --time_"),
    (["--time_steps=1", "--mesh=data:1"], "--mesh has no effect with --time_"),
    (["--time_steps=-1"], "--time_steps=-1; it must be >= 0"),
    (["--draft_ways=1"], "--draft_ways is for --mesh"),
    (["--draft_ways=1", "--mesh=data:1"], "a config with a target"),
  ],
)
def test_flags_that_do_not_go_together(place, flags, sentence):
  config = write_config(place / "flags.py", **entries(place))
  with pytest.raises(SystemExit, match=sentence):
    programs.run("train", config, *flags)


def test_steps_are_timed(place, capsys):
  config = write_config(place / "flags.py", **entries(place))
  programs.run("train", config, "--time_steps=1")
  assert re.search(
    r"a float32 product +[\d.]+ GFLOP/s", capsys.readouterr().out
  )


def test_a_mesh_of_one_trains_as_none(place, target):
  config = write_config(place / "meshed.py", **entries(place))
  folder = place / "meshed"
  programs.run("train", config, f"--folder={folder}", "--mesh=data:1")
  losses = [
    [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    for path in (folder / "metrics.jsonl", target.parent / "metrics.jsonl")
  ]
  np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_weights(place, target):
  steps = OPTIONS | dict(steps=60, save_every=7)
  config = write_config(place / "long.py", **entries(place, options=steps))
  programs.run("train", config, f"--folder={place / 'whole'}")
  folder = place / "killed"
  for num_lines in (10, 25):
    run_killed("train", config, folder, num_lines)
  programs.run("train", config, f"--folder={folder}")
  curves = [
    (place / name / "metrics.jsonl").read_text() for name in ("whole", "killed")
  ]
  assert curves[0] == curves[1]
  for name in ("best", "last"):
    first, last = (
      (place / run / name / "model.safetensors").read_bytes()
      for run in ("whole", "killed")
    )
    assert first == last
