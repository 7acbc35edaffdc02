"""Prompt files: a line that holds no prompt is named, and the rest is read."""

import pytest

from specdec.benchmark import prompts


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


def test_a_corpus_is_limited_by_category_and_length(tmp_path, capsys):
  path = tmp_path / "p.jsonl"
  lines = ([1], [2, 3], [4], [99])
  path.write_text("".join(f'{{"token_ids": {ids}}}\n' for ids in lines))
  corpus = prompts.read_corpus([path], None, False, 50, 1, max_tokens=1)
  assert corpus.encoded == [[1]] and corpus.groups == ["p"]
  assert corpus.too_long == 1
  assert corpus.broken == [
    "p.jsonl:4: prompt 0 holds token 99; accepted: 0 to 49"
  ]
  assert f"skipped: {corpus.broken[0]}" in capsys.readouterr().err
  assert len(prompts.read_corpus([path], None, False, 100).encoded) == 4
  path.write_text('{"token_ids": [2, 3]}')
  with pytest.raises(ValueError, match="no prompt has --max_prompt_tokens=1"):
    prompts.read_corpus([path], None, False, 50, max_tokens=1)
  with pytest.raises(ValueError, match="no prompt is left"):
    prompts.read_corpus([path], None, False, 3)
