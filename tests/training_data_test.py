"""Training data: read in order, served in an order that the step decides."""

import numpy as np
import pytest

from specdec.training import data, run
from specdec.training.ngram import Trigram
from tiny_training import OPTIONS, packed, stream


class TestData:
  def test_reads_a_folder_in_order(self, tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    documents = [tuple(document[:2]) for document in data.read(tmp_path)]
    assert documents == [
      ("a/x.py", "one"),
      ("b.txt", "two"),
      ("d.jsonl:1", "three"),
      ("d.jsonl:3", "four"),
    ]

  @pytest.mark.parametrize(
    "content, complaint",
    [
      ("[1]\n", "line 1 of .* has no `text`"),
      ('{"text": 3}\n', "line 1 of .* has no `text`"),
      ('{"text": "a"}\n{', "line 2 of .* is not JSON"),
      ("\n", "has no text"),
    ],
  )
  def test_refuses(self, tmp_path, content, complaint):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
      data.read(path)

  def test_token_ids_are_taken_as_they_are(self, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"token_ids": [5, 1]}\n{"token_ids": [3]}\n')

    class Words:
      eos_ids, vocab_size = (1,), 6

      def encode_many(self, texts):
        assert not texts
        return []

    ids = data.tokenize(data.read(path), Words())
    assert ids.tolist() == [5, 1, 3, 1]  # no second end
    Words.vocab_size = 5
    with pytest.raises(ValueError, match="token 5; the tokenizer has 5"):
      data.tokenize(data.read(path), Words())

  def test_a_line_ends_at_its_newline_alone(self, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\u2028b"}\r\n{"text": "c"}')
    assert [document.text for document in data.read(path)] == ["a\u2028b", "c"]

  def test_shorter_than_a_sequence(self):
    with pytest.raises(ValueError, match="7 tokens; one sequence takes 8"):
      data.Packed(np.arange(7), 7)
    one = data.Packed(np.arange(8), 7)
    np.testing.assert_array_equal(one.batch(3, 2), [np.arange(8)] * 2)

  def test_the_last_tokens_are_among_what_a_run_checks(self):
    """They are in no row, and decide how many sequences there are."""
    ids = np.arange(88)
    few, more = data.Packed(ids[:87], 8), data.Packed(ids, 8)
    np.testing.assert_array_equal(few.rows, more.rows)
    assert few.count != more.count
    checked = [
      run.settings(OPTIONS, (x, few))["checksums"] for x in (few, more)
    ]
    assert checked[0] != checked[1]

  def test_an_epoch_serves_every_sequence_once(self):
    tokens = np.arange(100)
    cut = data.Packed(tokens, 7, seed=3)
    for epoch in range(3):
      rows = np.concatenate(
        [cut.batch(epoch * cut.count + i, 1) for i in range(cut.count)]
      )
      starts = np.sort(rows[:, 0])
      np.testing.assert_array_equal(np.diff(starts), 7)  # no overlap, no gap
      np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(8))

  def test_order_depends_on_step_and_seed_alone(self):
    one, other = packed(), packed()
    late = other.batch(40, 4)  # without having asked for those before
    for step in range(41):
      batch = one.batch(step, 4)
    np.testing.assert_array_equal(batch, late)
    assert not np.array_equal(one.batch(0, 4), one.batch(1, 4))
    reseeded = data.Packed(stream(), OPTIONS.sequence, seed=1)
    assert not np.array_equal(one.batch(0, 4), reseeded.batch(0, 4))

  def test_held_out_is_spread(self):
    rows = data.Packed(np.arange(101), 10).evenly_spaced(3)
    np.testing.assert_array_equal(rows[:, 0], [0, 40, 90])

  def test_numbered_batches_say_where_they_stand(self):
    baseline, numbered = packed(), data.Numbered(packed())
    assert numbered.tokens == baseline.tokens
    for step in (0, 30):
      batch = numbered.batch(step, 3)
      np.testing.assert_array_equal(batch["tokens"], baseline.batch(step, 3))
      np.testing.assert_array_equal(batch["step"], step)
      np.testing.assert_array_equal(batch["row"], np.arange(3))


@pytest.mark.parametrize("context", [(0, 1), (1, 2), (2, 2), (4, 4), (0, 4)])
def test_trigram_distributions_sum_to_one(context):
  # Contexts that were seen, seen in part, and never: token 4 is in no text.
  stream = np.random.default_rng(0).integers(0, 4, 60)
  model = Trigram(stream, 5)
  texts = [np.array([*context, last]) for last in range(5)]
  distribution = np.exp([model.log_probs(text)[0] for text in texts])
  np.testing.assert_allclose(distribution.sum(), 1, rtol=1e-12)
  assert distribution.min() > 0


def test_trigram_by_hand():
  model = Trigram(np.array([0, 1, 2, 0, 1, 2, 0, 1, 3]), 4)
  # Triples: 012 x2, 120 x2, 201 x2, 013 x1; discount 1 / (1 + 2 * 3) = 1/7.
  # Pairs by distinct triples: 12, 20, 01, 13, each 1: discount 4 / 4 = 1, so
  # all falls to singles: 2, 0, 1, 3, each 1, discount 1: uniform, 1/4.
  probability = 2 / 3 - (1 / 7) / 3 + (2 / 7) / 3 * 0.25
  log_probs = model.log_probs(np.array([0, 1, 2]))
  np.testing.assert_allclose(np.exp(log_probs), [probability], rtol=1e-12)
  with pytest.raises(ValueError, match="2 tokens"):
    Trigram(np.array([1, 2]), 4)
