"""A corpus in a file: kept, added to, and refused where it does not fit."""

import io
import os
import threading
import time
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
  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(ValueError, match="pipe is no regular file"):
    text_corpus.load(tmp_path / "pipe", 3)


@pytest.mark.parametrize(
  "change",
  [
    {"tokens": np.array([0.5, 1, 2])},
    {"tokens": np.array(["a", "b", "c"])},
    {"tokens": np.zeros((1, 3), np.int32)},
    {"lengths": np.array([5, -2])},
    {"lengths": np.int32(3)},
    {"version": np.array([1, 2])},
  ],
)
def test_fields_of_another_kind_are_refused(change, tmp_path):
  path = tmp_path / "corpus.npz"
  fields = {"version": 1, "vocab_size": 3, "vocabulary": ""}
  fields |= {"tokens": np.arange(3), "lengths": np.array([3])}
  np.savez(path, **fields)
  assert text_corpus.load(path, 3) == [[0, 1, 2]]
  np.savez(path, **fields | change)
  with pytest.raises(ValueError, match="no corpus of texts"):
    text_corpus.load(path, 3)


def test_damaged_bytes_are_refused_or_read(tmp_path):
  path, rng = tmp_path / "corpus.npz", np.random.default_rng(0)
  written, refused = io.BytesIO(), set()
  fields = {"version": 1, "vocab_size": 9, "vocabulary": ""}
  fields |= {"tokens": np.arange(9), "lengths": np.array([9])}
  np.savez_compressed(written, **fields)
  for _ in range(600):
    damaged = bytearray(written.getvalue())
    damaged[rng.integers(len(damaged))] = rng.integers(256)
    path.write_bytes(damaged)
    try:
      text_corpus.load(path, 9)
    except ValueError as error:
      refused.add(type(error.__context__).__name__)
  assert {"error", "NotImplementedError", "BadZipFile"} <= refused


def test_who_adds_at_the_same_time_loses_nothing(tmp_path, monkeypatch):
  path, honest = tmp_path / "corpus.npz", text_corpus.load

  def load(*args):
    texts = honest(*args)
    time.sleep(0.2)  # as long as it takes the other to write
    return texts

  text_corpus.add(path, [[0]], 9)
  monkeypatch.setattr(text_corpus, "load", load)
  some = [
    threading.Thread(target=text_corpus.add, args=(path, [[1, i]], 9))
    for i in range(3)
  ]
  for thread in some:
    thread.start()
  for thread in some:
    thread.join()
  assert len(honest(path, 9)) == 4
