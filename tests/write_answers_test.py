"""scripts/write_answers.py: whole answers of the target, once each."""

import json

import jax
import numpy as np

import programs
from specdec import checkpoints, decode, sampling
from specdec.models import transformer
from specdec.types import Params


def test_answers_are_autoregressive_texts_and_it_goes_on(tmp_path, capsys):
  target = programs.write_model(tmp_path / "target", num_layers=1)
  prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
  words = ["abc", "hello there", "xyz", "a"]
  lines = (json.dumps({"prompt": word}) + "\n" for word in words)
  prompts.write_text("".join(lines))

  def write():
    programs.run(
      "write_answers",
      f"--target={target}",
      f"--prompt_file={prompts}",
      f"--output={out}",
      "--batch=2",
      "--max_new_tokens=6",
    )
    found = (out / "answers.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in found if line.endswith("}")]
    assert len(found) == len(words)  # each once
    return {line["prompt"]: line for line in found}

  with programs.waits() as waits:
    answers = write()
  assert waits == ["compiling prompts of at most 64 tokens"]
  assert sorted(answers) == [0, 1, 2, 3]
  checkpoint = checkpoints.load(target)
  ids = checkpoint.tokenizer.encode("hello there")
  state = decode.autoregress(
    transformer.model(checkpoint.config),
    Params(checkpoint.params),
    np.array([ids]),
    np.array([len(ids)]),
    jax.random.key(0),
    max_length=len(ids) + 6,
    sampling=sampling.settings(1),
  )
  assert answers[1]["token_ids"] == state.tokens[0].tolist()
  assert answers[1]["prompt_tokens"] == len(ids)
  assert "4 answers of 24 tokens" in capsys.readouterr().out

  path = out / "answers.jsonl"
  kept = path.read_text().splitlines()[:2]
  path.write_text("\n".join(kept) + '\n{"prompt": 3, "tok')
  assert write() == answers
