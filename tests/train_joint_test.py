"""Joint training of a tiny target and its drafter or early exits."""

import re

import jax
import numpy as np
import pytest

import programs
from specdec import checkpoints
from specdec.checkpoints import learned as saved
from specdec.training import train_joint
from specdec.training.setup import from_config
from tiny_training import (
  DECODING,
  SHAPE,
  STEPS,
  assert_kills_change_nothing,
  log,
  run_program,
  write_letters,
)

MODEL = dict(vocab_size=32, num_layers=3, tied=True, **SHAPE)
PROPHET = dict(
  head_config=dict(
    kind="prophet", levels=2, num_layers=1, head="shared", **SHAPE
  ),
  loss=dict(divergence="cross_entropy", token_weight=1.0, decay=1.0),
)
SKIP = dict(
  layer_skip=dict(dropout=0.5, exit_scale=0.2, rotation=2),
  decoding=DECODING | dict(exit_layer=1),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A folder with text and a tokenizer of single letters."""
  folder = tmp_path_factory.mktemp("place")
  write_letters(folder / "letters")
  (folder / "text").mkdir()
  for name in "ab":
    text = "".join(f"the cat {name * (i % 5)} sat on a mat " for i in range(60))
    (folder / "text" / f"{name}.txt").write_text(text)
  return folder


def entries(place, **changes):
  shared = dict(
    tokenizer=str(place / "letters"),
    data=str(place / "text"),
    held_out=str(place / "text" / "b.txt"),
    model=MODEL,
    options=STEPS,
    decoding=DECODING,
  )
  return shared | changes


def test_its_target_and_drafter_decode_together(place, capsys):
  prophet = run_program(place, "prophet", **entries(place, **PROPHET))
  train, evaluated = log(prophet, "train"), log(prophet, "held_out")
  for entry in train:
    loss = entry["cross_entropy"] + entry["auxiliary"]
    assert entry["loss"] == pytest.approx(loss, rel=1e-5)
  assert [x["step"] for x in evaluated] == [6, 12]
  assert all(x["loss"] == x["cross_entropy"] for x in evaluated)
  assert evaluated[-1]["loss"] < train[0]["cross_entropy"]
  assert 0 <= evaluated[-1]["acceptance_2"] <= 1
  decoded = log(prophet, "decoding")[-1]
  assert 1 <= decoded["tokens_per_pass"] <= DECODING["k"] + 1
  weights = []
  for name in ("best", "last"):
    target = checkpoints.load(prophet / name)
    learned = saved.load(prophet / name / "drafter.safetensors", target)
    weights.append((target.params, learned.net))
  jax.tree.map(np.testing.assert_array_equal, *weights)  # the end was the best
  programs.run(
    "generate",
    f"--target={prophet / 'last'}",
    f"--drafter=head({prophet / 'last' / 'drafter.safetensors'})",
    "--prompt=the cat",
    "--k=2",
    "--max_new_tokens=12",
  )
  assert re.search(r"same text as the baseline +yes", capsys.readouterr().out)
  # It is for its target alone.
  other = checkpoints.load(programs.write_model(place / "other", seed=3))
  with pytest.raises(ValueError, match="trained for another target"):
    saved.load(prophet / "best" / "drafter.safetensors", other)


def test_layer_skip_drafts_with_its_first_layers(place):
  folder = run_program(place, "layerskip", **entries(place, **SKIP))
  evaluated, decoded = (log(folder, x)[-1] for x in ("held_out", "decoding"))
  assert evaluated["exit_1"] > 0 and "exit_3" not in evaluated
  assert decoded["tokens_per_pass"] >= 1
  assert not list(folder.rglob("drafter.safetensors"))


def test_refuses_before_it_begins(place):
  changes = dict(layer_skip=None, model=MODEL | dict(vocab_size=8))
  setup = from_config(entries(place, **changes))
  with pytest.raises(ValueError, match="needs a row for each"):
    train_joint.train(setup, place / "bad")
  assert not (place / "bad").exists()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [PROPHET, SKIP])
def test_killed_it_ends_with_the_same_weights(place, tmp_path, changes):
  files = ["metrics.jsonl", "last/model.safetensors", "best/config.json"]
  if changes is PROPHET:
    files += ["last/drafter.safetensors", "best/drafter.safetensors"]
  assert_kills_change_nothing(tmp_path, files, **entries(place, **changes))
