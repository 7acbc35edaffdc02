"""Other engines beside ours: what they are asked, and what is made of it."""

import gguf
import numpy as np
import pytest

import gguf_files
from specdec.benchmark import engines, metrics, peers
from specdec.benchmark.batches import Batch
from specdec.benchmark.setup import Setup

PROMPTS = [3, 1, 4, 1, 5], [9]


class Counter:
  """Says how many tokens it has read, and notes what it was asked."""

  def __init__(self):
    self.length, self.calls = 0, []

  def read(self, ids):
    self.length = len(ids)
    self.calls.append(("read", list(ids)))

  def step(self, ids):
    self.length += len(ids)
    self.calls.append(("step", list(ids)))
    return self.length

  def rewind(self, length):
    self.length = length


def test_an_engine_reads_the_prompt_and_is_then_given_its_own_tokens():
  engine = Counter()
  done = engines.decode(engine, [0, 3], Batch([PROMPTS[0]], [1]))
  assert done.texts == [[5, 6, 7]] and done.seconds > 0
  assert engine.calls == [
    ("read", [3, 1, 4, 1]), ("step", [5]), ("step", [5]), ("step", [6])
  ]  # fmt: skip


def test_a_pass_is_timed_behind_the_same_context_every_time():
  engine = Counter()
  assert engines._pass_timer(engine, [7, 8], 3)() > 0
  assert engine.length == 2
  assert engine.calls[1:] == [("step", [7, 7, 7])] * 8


def test_geometric_means_have_the_error_of_their_repeats():
  [rates] = (np.array([[2.0, 8.0], [4.0, 16.0]]),)  # means 4 and 8
  mean = metrics.geometric_mean(rates)
  assert mean.value == pytest.approx(32**0.5)
  assert mean.error == pytest.approx(mean.value * np.log(2) / 2)
  assert metrics.geometric_mean(rates[:1]).error is None


def test_what_is_not_installed_or_cannot_read_the_target_is_left_out(
  tmp_path, monkeypatch
):
  loaded = peers.load([*peers.PEERS], tmp_path, 64, 1)
  assert "llama.cpp-F32" not in loaded.engines
  monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
  loaded = peers.load([*peers.PEERS], tmp_path, 64, 1)
  assert loaded[:2] == ({}, {})
  assert [x.partition(": ")[2] for x in loaded.left_out] == [
    *["not installed: pip install llama-cpp-python"] * 2,
    "not installed: pip install torch transformers",
  ]


@pytest.mark.parametrize("name", ["llama.cpp-F32", "transformers"])
def test_an_installed_engine_in_float32_writes_our_text(
  tmp_path, monkeypatch, name
):
  if peers.PEERS[name].missing:
    pytest.skip(peers.PEERS[name].missing)
  monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
  path = gguf_files.write(tmp_path / "m.gguf", change=_vocabulary)
  setup = Setup(str(path), drafter="none", prompt_size=8, max_new_tokens=8)
  decoder = setup.load()
  engine = peers.load([name], path, 64, 1).engines[name]
  for prompt in PROMPTS:
    batch = Batch([prompt], [0])
    [text] = decoder.complete(batch).texts
    assert engines.decode(engine, [len(text)], batch).texts == [text]
    engine.read(prompt)
    again = engine.step([1, 2, 3])
    engine.rewind(len(prompt))
    assert engine.step([1, 2, 3]) == again


def _vocabulary(writer):
  """Adds what llama.cpp does not load a model without."""
  size = gguf_files.CONFIG.vocab_size
  writer.add_context_length(64)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  letters = [chr(ord("A") + i) for i in range(size - 1)]
  writer.add_token_list([*letters, "AB"])
  writer.add_token_types([int(gguf.TokenType.NORMAL)] * size)
  writer.add_token_merges(["A B"])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(size - 1)
