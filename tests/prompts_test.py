"""Prompt files: a line that holds no prompt is named, and the rest is read."""

import json
import sys
import types

import numpy as np
import pytest

from specdec.benchmark import evaluation, prompts
from specdec.benchmark.setup import Setup
from specdec.checkpoints import shipped
from specdec.cli import prompt_flags


@pytest.mark.parametrize(
  "line, sentence",
  [
    (b"{", " is not JSON"),
    (b'{"prompt": "\xff"}', " is not UTF-8 text"),
    (b'{"prompt": "\\ud800"}', " holds half of a surrogate pair"),
    (b'{"prompt": ' + b"[" * 10**5, " is no JSON that can be read"),
    (b"1" * 5000, " is no JSON that can be read"),
    (b"NaN", " is not a JSON object"),
    (b'{"token_ids": [1.5]}', ": token_ids must be a list of integers"),
    (b'{"prompt": 3}', " has none of prompt"),
  ],
)
def test_a_broken_line_is_skipped(tmp_path, line, sentence):
  path = tmp_path / "p.jsonl"
  path.write_bytes(b'{"prompt": "a"}\n' + line + b'\n{"token_ids": [1]}\n')
  read, broken = prompts.scan(path)
  assert [(p.text, p.token_ids) for p in read] == [("a", None), (None, (1,))]
  assert broken[0].startswith(f"line 2 of {path}{sentence}")
  path.write_bytes(line)
  with pytest.raises(ValueError, match=f"holds no prompt: line 1 of {path}"):
    prompts.scan(path)


PLACEHOLDER = (
  "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
)


def speed_bench():
  """Rows in SPEED-Bench's columns, of which one is not completed."""
  rows = [("coding", "Sort."), ("math", "Add."), ("rag", PLACEHOLDER)]
  rows += [("low_entropy", "Copy: " + "x " * 99)]
  return [
    {
      "question_id": f"q{number}",
      "category": category,
      "sub_category": "",
      "turns": [text, "And why?"],
      "source": "somewhere",
      "src_id": str(number),
      "difficulty": "",
      "multiturn": True,
    }
    for number, (category, text) in enumerate(rows)
  ]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_speed_bench_is_read_as_it_is_downloaded(tmp_path, suffix):
  path = tmp_path / f"test.{suffix}"
  if suffix == "parquet":
    pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(speed_bench()), path)
  else:
    lines = [json.dumps(row) for row in speed_bench()]
    path.write_text("\n".join(lines))
  read, broken = prompts.scan(path)
  # Its categories are not Spec-Bench's of the same names.
  assert [one.category for one in read] == ["coding", "math", "low_entropy"]
  assert read[0].text == "Sort."
  [sentence] = broken
  assert "3 of" in sentence and "prepare_data.py" in sentence
  if suffix == "parquet":
    path.write_bytes(b"PAR1" + path.read_bytes()[9:])
    with pytest.raises(ValueError, match="cannot be read"):
      prompts.scan(path)


def test_splits_of_speed_bench_are_groups_of_their_own(tmp_path):
  line = json.dumps({"category": "low_entropy", "turns": ["hello"]})
  for size in ("1k", "2k"):
    (tmp_path / f"throughput_{size}").mkdir()
    path = tmp_path / f"throughput_{size}" / "test.jsonl"
    path.write_text(line)
    [prompt] = prompts.read(path)
    assert prompt.category == f"{size}, low_entropy"
    assert prompt.name == f"throughput_{size}/test.jsonl:1"


@pytest.mark.parametrize("name", ["x.json", "x.csv"])
def test_a_table_is_not_taken_for_a_prompt(tmp_path, name):
  (tmp_path / name).write_text('[{"prompt": "a"}]')
  with pytest.raises(ValueError, match=r"give \.jsonl, a prompt a line"):
    prompts.read(tmp_path / name)


def test_parquet_without_its_reader(tmp_path, monkeypatch):
  (tmp_path / "x.parquet").write_bytes(b"")
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  with pytest.raises(ValueError, match="pip install pyarrow"):
    prompts.scan(tmp_path / "x.parquet")


@pytest.mark.parametrize(
  "name, place",
  [
    ("spec_bench.jsonl", "hemingkx/Spec-Bench"),
    ("SPEED-Bench/throughput_1k.parquet", "nvidia/SPEED-Bench"),
    ("throughput_4k/test-00000-of-00001.parquet", "nvidia/SPEED-Bench"),
    ("HumanEval.jsonl", "openai/human-eval"),
  ],
)
def test_where_a_file_that_is_not_there_can_be_had(tmp_path, name, place):
  with pytest.raises(FileNotFoundError, match=place):
    prompts.scan(tmp_path / name)
  with pytest.raises(FileNotFoundError, match=r"mine\.jsonl does not exist$"):
    prompts.scan(tmp_path / "mine.jsonl")


def test_random_tokens_are_told_from_text():
  target = Setup(shipped.TARGET, "none").load_target()
  size = target.checkpoint.config.vocab_size
  rng = np.random.default_rng(0)
  noise = [rng.integers(1, size, n).tolist() for n in (40, 200, 90)]
  [sentence] = evaluation.unlikely(target, noise, ["noise"] * 3)
  assert sentence.startswith("random tokens, or a language that the target")
  text = [target.checkpoint.tokenizer.encode(shipped.PROMPT.read_text())]
  assert evaluation.unlikely(target, text, ["text"]) == []
  assert evaluation.unlikely(target, [[5]], ["one"]) == []  # nothing to look at
  # A group of them is named, whatever the others are.
  groups = ["text"] * 8 + ["noise"] * 3
  [sentence] = evaluation.unlikely(target, text * 8 + noise, groups)
  assert "noise (" in sentence and "text (" not in sentence


def test_a_corpus_is_limited_by_category_and_length(tmp_path, capsys):
  path = tmp_path / "p.jsonl"
  lines = ([1], [2, 3], [4], [99])
  path.write_text("".join(f'{{"token_ids": {ids}}}\n' for ids in lines))
  corpus = prompts.read_corpus([path], None, False, 50, 1, max_tokens=1)
  assert corpus.encoded == [[1]] and corpus.groups == ["p"]
  assert corpus.too_long == 1
  assert corpus.broken == ["p.jsonl:4 holds token 99; accepted: 0 to 49"]
  assert f"skipped: {corpus.broken[0]}" in capsys.readouterr().err
  assert len(prompts.read_corpus([path], None, False, 100).encoded) == 4
  path.write_text('{"token_ids": [2, 3]}')
  with pytest.raises(ValueError, match="no prompt has --max_prompt_tokens=1"):
    prompts.read_corpus([path], None, False, 50, max_tokens=1)
  with pytest.raises(ValueError, match="no prompt is left"):
    prompts.read_corpus([path], None, False, 3)


def a_model(tokenizer="some", layers=0, trained_length=None):
  config = types.SimpleNamespace(encoder_layers=layers)
  return types.SimpleNamespace(
    config=config,
    tokenizer=tokenizer,
    source=str(shipped.FOLDER / shipped.T5),
    trained_length=trained_length,
  )


def flags(**changes):
  usual = dict(prompt=None, prompt_file=[], target="m", max_new_tokens=8)
  usual |= dict(temperature=0.0, drafter=None, html=None)
  return types.SimpleNamespace(**(usual | changes))


def test_without_a_prompt_there_are_beginnings():
  assert len(prompt_flags.beginnings(flags(), a_model())) == 3
  assert len(prompt_flags.beginnings(flags(), a_model(layers=2))) == 1
  for given, model in (
    (dict(prompt=""), a_model()),
    (dict(prompt_file=["p.jsonl"]), a_model()),
    ({}, a_model(tokenizer=None)),
  ):
    assert prompt_flags.beginnings(flags(**given), model) == []


def test_what_a_user_should_know_of_a_model():
  def remarks(length, **changes):
    model = a_model(trained_length=changes.pop("trained_length", None))
    return prompt_flags.remarks(flags(**changes), model, [[0] * length, [0]])

  assert remarks(5, prompt="x") == []
  assert remarks(5, prompt="x", trained_length=13) == []
  [long] = remarks(6, prompt="x", trained_length=13)
  assert "trained on 13 positions, these texts have up to 14" in long
  [about] = remarks(5, prompt="x", target=shipped.TARGET)
  assert about.startswith("stdlib-11m continues Python source and nothing els")
  assert remarks(5)[-1].startswith("Next:")
  assert "--temperature=0.8" in remarks(5)[-1]
  # What was just done is not proposed, and the target is the same.
  steps = remarks(5, temperature=0.8, target="python-11m")[-1]
  assert "--temperature" not in steps
  assert "generate.py --target=python-11m --html=page.html" in steps
