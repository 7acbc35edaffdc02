"""write_text: what a target writes is its autoregressive text, each once."""

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


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  """A chat model whose tokens are letters; y ends a text."""
  folder = tmp_path_factory.mktemp("target")
  programs.write_model(folder, num_layers=1)
  config = {"eos_token": "y", "chat_template": TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder


def written_by(target, prompt, rows, new_tokens, temperature):
  """The texts of autoregressive decoding, prompts included."""
  checkpoint = checkpoints.load(target)
  ids = checkpoint.tokenizer.encode(prompt)
  state = decode.autoregress(
    transformer.model(checkpoint.config),
    Params(checkpoint.params),
    np.array([ids] * rows),
    np.array([len(ids)] * rows),
    jax.random.key(0),
    max_length=len(ids) + new_tokens,
    sampling=sampling.settings(rows, temperature),
    eos_ids=checkpoint.tokenizer.eos_ids,
  )
  rows = zip(state.tokens.tolist(), state.length.tolist())
  return checkpoint.tokenizer, [row[:length] for row, length in rows]


def test_answers_are_autoregressive_texts_and_it_resumes(
  tmp_path, target, capsys
):
  prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
  words = ["abc", "hello there", "xyz", "a"]
  lines = (json.dumps({"prompt": word}) + "\n" for word in words)
  prompts.write_text("".join(lines))

  def write():
    programs.run(
      "write_text",
      f"--target={target}",
      f"--prompt_file={prompts}",
      f"--output={out}",
      "--batch=2",
      "--max_new_tokens=6",
    )
    lines = (out / "answers.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines if line.endswith("}")]
    assert len(lines) == len(words)  # each once
    return {line["prompt"]: line for line in lines}

  with programs.waits() as waits:
    answers = write()
  assert waits == ["compiling prompts of at most 64 tokens"]
  assert sorted(answers) == [0, 1, 2, 3]
  _, [text] = written_by(target, "hello there", 1, 6, 0.0)
  assert answers[1]["token_ids"] == text
  assert answers[1]["prompt_tokens"] == len("hello there")
  tokens = sum(
    len(x["token_ids"]) - x["prompt_tokens"] for x in answers.values()
  )
  assert f"4 answers of {tokens} tokens" in capsys.readouterr().out

  path = out / "answers.jsonl"
  kept = path.read_text().splitlines()[:2]
  path.write_text("\n".join(kept) + '\n{"prompt": 3, "tok')
  assert write() == answers


def write_prompts(target, out, *arguments):
  programs.run(
    "write_text",
    "--write=prompts",
    f"--target={target}",
    f"--output={out}",
    "--count=13",
    "--batch=5",
    "--temperature=1",
    "--max_new_tokens=20",
    *arguments,
  )


def test_messages_are_drawn_behind_the_head_of_a_message(tmp_path, target):
  write_prompts(target, tmp_path / "out", "--shortest=3", "--every=4")

  def read(name):
    lines = (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]

  tokenizer, rows = written_by(target, "wx", 13, 20, 1.0)
  [end] = tokenizer.eos_ids
  texts = [tokenizer.decode(x[2:-1]).strip() for x in rows if x[-1] == end]
  texts = [x for x in dict.fromkeys(texts) if len(x) >= 3]
  assert 4 <= len(texts) < 13  # some ended in time, some did not
  held_out = texts[3::4]
  assert read("held_out") == held_out
  assert read("prompts") == [x for x in texts if x not in held_out]
  with pytest.raises(SystemExit, match="larger --max_new_tokens"):
    write_prompts(target, tmp_path / "none", "--shortest=21")
