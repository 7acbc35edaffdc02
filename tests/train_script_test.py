"""Tokenizer, target, draft, conversion: one program after another."""

import json
import re

import jax
import numpy as np
import pytest

import programs
from specdec import checkpoints
from specdec.checkpoints import shipped
from specdec.training import train_model
from specdec.training.setup import from_config
from tiny_training import (
  DECODING,
  SHAPE,
  STEPS,
  assert_kills_change_nothing,
  log,
  run_program,
  write_config,
)

MODEL = dict(vocab_size=300, num_layers=1, tied=True, **SHAPE)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with text, a tokenizer and the config of a target."""
  folder = tmp_path_factory.mktemp("place")
  (folder / "text").mkdir()
  for name in "abc":
    lines = [f"def {name}{i}(x):\n  return x + {i % 7}\n\n" for i in range(150)]
    (folder / "text" / f"{name}.py").write_text("".join(lines))
  programs.run(
    "prepare_data",
    "--make=tokenizer",
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
    options=STEPS,
  )
  return shared | changes


@pytest.fixture(scope="module")
def target(place):
  return run_program(place, "target", **entries(place)) / "best"


def test_distils_a_draft_that_generate_can_use(place, target, capsys):
  draft = run_program(
    place,
    "draft",
    **entries(
      place,
      target=str(target),
      loss="forward_kl",
      samples=dict(count=16, prompt=4, temperature=1.0),
      decoding=DECODING,
    ),
  )
  errors = capsys.readouterr().err
  assert "sampling" in errors and "tokens_per_pass" in errors
  assert "step 12: held-out" in errors
  assert [x["step"] for x in log(draft, "decoding")] == [6, 12]
  programs.run(
    "generate",
    f"--target={target}",
    f"--drafter=model({draft / 'last'})",
    "--prompt=def a1(x):",
    "--max_new_tokens=12",
  )
  assert re.search(r"same text as the baseline +yes", capsys.readouterr().out)


def test_converts_there_and_back(place, target, capsys):
  def convert(source, name, *flags):
    output = f"--output={place / name}"
    programs.run("convert", f"--source={source}", output, *flags)

  convert(target, "orbax", "--layout=orbax")
  *_, last = capsys.readouterr().out.splitlines()
  command = f"python scripts/generate.py --target={place / 'orbax'}"
  assert last == f"to use it: {command}"
  convert(place / "orbax", "back")
  first, last = (checkpoints.load(x) for x in (target, place / "back"))
  assert first.config == last.config
  jax.tree.map(np.testing.assert_array_equal, first.params, last.params)
  assert first.tokenizer.tokens == last.tokenizer.tokens
  assert first.eos_ids == last.eos_ids == (0,)
  # An encoder-decoder whose file has no key for a tied head.
  convert("stdlib-t5-0.5m", "t5_orbax", "--layout=orbax")
  ours = checkpoints.load(shipped.FOLDER / "stdlib-t5-0.5m")
  again = checkpoints.load(place / "t5_orbax")
  assert again.config == ours.config
  jax.tree.map(np.testing.assert_array_equal, ours.params, again.params)
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
    (dict(options=STEPS | dict(sequence=99999)), "one sequence takes 100000"),
    (
      dict(target="{place}/other", loss="forward_kl", decoding=DECODING),
      "different vocabularies: token ",
    ),
    (
      dict(start="{place}/target/best", model=MODEL | dict(width=32)),
      "width: 16",
    ),
  ],
)
def test_refuses_texts_and_models_that_do_not_fit(
  place, target, other_words, changes, complaint
):
  changes = json.loads(json.dumps(changes).replace("{place}", str(place)))
  with pytest.raises((ValueError, FileNotFoundError), match=complaint):
    train_model.load(from_config(entries(place, **changes)))


@pytest.fixture(scope="module")
def other_words(place, target):
  """The target again, with two tokens of its vocabulary exchanged."""
  model = checkpoints.load(target)
  checkpoints.save_safetensors(place / "other", model.params, model.config)
  model.tokenizer.save(place / "other")
  path = place / "other" / "tokenizer.json"
  content = json.loads(path.read_text())
  words = content["model"]["vocab"]
  words["a"], words["b"] = words["b"], words["a"]
  path.write_text(json.dumps(content))


def test_refuses_before_it_begins(place):
  with pytest.raises(SystemExit, match=r"^train: the config sets speed"):
    run_program(place, "bad", **entries(place, speed="high"))
  assert not (place / "bad").exists()


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
  flags = f"--folder={folder}", "--mesh=data:1", f"--profile={place / 'trace'}"
  programs.run("train", config, *flags)
  assert [*(place / "trace").rglob("*.xplane.pb")]
  losses = [[x["loss"] for x in log(run)] for run in (folder, target.parent)]
  np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_weights(place, tmp_path):
  files = ["metrics.jsonl", "best/model.safetensors", "last/model.safetensors"]
  assert_kills_change_nothing(tmp_path, files, (10, 25), **entries(place))
