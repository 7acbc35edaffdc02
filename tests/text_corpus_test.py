"""A corpus in a file: kept, added to, and refused where it does not fit."""

import types

import numpy as np
import pytest

from specdec.checkpoints import text_corpus

ONE = types.SimpleNamespace(tokens=("a", "b", None))
OTHER = types.SimpleNamespace(tokens=("a", "c", None))


def test_texts_are_kept_each_once(tmp_path):
  path = tmp_path / "corpus.npz"
  assert text_corpus.add(path, [[1, 2], [], [0]], 3, ONE) == 2
  assert text_corpus.add(path, [[0], [2, 2, 2], [1, 2]], 3, ONE) == 3
  assert text_corpus.load(path, 3, ONE) == [[1, 2], [0], [2, 2, 2]]
  assert text_corpus.load(path, 3) == [[1, 2], [0], [2, 2, 2]]
  assert [x.name for x in tmp_path.iterdir()] == ["corpus.npz"]  # no scratch


def test_another_vocabulary_is_refused(tmp_path):
  path = tmp_path / "corpus.npz"
  text_corpus.add(path, [[1, 2]], 3, ONE)
  with pytest.raises(
    ValueError, match="over 3 token ids, and the target has 4"
  ):
    text_corpus.load(path, 4, ONE)
  with pytest.raises(ValueError, match="another tokenizer than the target's"):
    text_corpus.load(path, 3, OTHER)
  before = path.read_bytes()
  with pytest.raises(ValueError, match="another tokenizer"):
    text_corpus.add(path, [[0]], 3, OTHER)
  assert path.read_bytes() == before


def test_what_is_no_corpus_is_refused(tmp_path):
  path = tmp_path / "corpus.npz"
  path.write_text("[1, 2]")
  with pytest.raises(ValueError, match="no corpus of texts"):
    text_corpus.load(path, 3)
  np.savez(path, tokens=np.arange(3))
  with pytest.raises(ValueError, match="no corpus of texts"):
    text_corpus.load(path, 3)
  text_corpus.add(tmp_path / "large.npz", [[7]], 3)
  with pytest.raises(ValueError, match=r"token ids outside 0\.\.2"):
    text_corpus.load(tmp_path / "large.npz", 3)
  with pytest.raises(FileNotFoundError):
    text_corpus.load(tmp_path / "nowhere.npz", 3)
