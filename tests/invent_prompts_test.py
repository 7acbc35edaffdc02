"""scripts/invent_prompts.py: a model's own users' messages, each once."""

import json

import jax
import numpy as np
import pytest

import programs
from specdec import checkpoints, decode, sampling
from specdec.models import transformer
from specdec.types import Params

# A message stands between x and y; the assistant's head is z.
TEMPLATE = "{% for m in messages %}wx{{ m['content'] }}y{% endfor %}z"


def write_chat_model(folder):
  """Tokens are letters, and y ends a text."""
  programs.write_model(folder, num_layers=1)
  config = {"eos_token": "y", "chat_template": TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder


def invent(target, out, *arguments):
  programs.run(
    "invent_prompts",
    f"--target={target}",
    f"--output={out}",
    "--count=13",
    "--batch=5",
    "--temperature=1",
    "--max_new_tokens=20",
    *arguments,
  )


def test_messages_are_drawn_behind_the_users_head(tmp_path):
  target, out = write_chat_model(tmp_path / "target"), tmp_path / "out"
  invent(target, out, "--shortest=3", "--every=4")

  def read(name):
    lines = (out / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]

  checkpoint = checkpoints.load(target)
  ids = checkpoint.tokenizer.encode("wx")
  end = checkpoint.tokenizer.eos_ids
  state = decode.autoregress(
    transformer.model(checkpoint.config),
    Params(checkpoint.params),
    np.array([ids] * 13),
    np.array([len(ids)] * 13),
    jax.random.key(0),
    max_length=len(ids) + 20,
    sampling=sampling.settings(13, 1.0),
    eos_ids=end,
  )
  texts = [
    checkpoint.tokenizer.decode(row[2 : size - 1]).strip()
    for row, size in zip(state.tokens.tolist(), state.length.tolist())
    if row[size - 1] in end
  ]
  texts = [x for x in dict.fromkeys(texts) if len(x) >= 3]
  assert 4 <= len(texts) < 13  # some ended in time, some did not
  held_out = texts[3::4]
  assert read("held_out") == held_out
  assert read("prompts") == [x for x in texts if x not in held_out]


@pytest.mark.parametrize(
  "arguments, sentence",
  [
    (["--temperature=0"], "again and again"),
    (["--count=0"], "--count=0"),
    (["--every=-1"], "--every=-1"),
    (["--shortest=21"], "larger --max_new_tokens"),
  ],
)
def test_refusals(tmp_path, arguments, sentence):
  target = write_chat_model(tmp_path / "target")
  with pytest.raises(SystemExit, match=sentence):
    invent(target, tmp_path / "out", *arguments)


def test_a_model_without_a_template(tmp_path):
  target = programs.write_model(tmp_path / "target")
  with pytest.raises(SystemExit, match="chat template"):
    invent(target, tmp_path / "out")
