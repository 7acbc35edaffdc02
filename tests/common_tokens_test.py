"""What two tokenizers share, and one's tokens in those of the other."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, processors

from gguf_files import CONFIG, byte_level, random_params
from specdec import checkpoints
from specdec.benchmark.batches import Batch
from specdec.benchmark.setup import Setup
from specdec.checkpoints import common_tokens as module
from specdec.checkpoints.common_tokens import common_tokens

TEXTS = ["the cat and the hat", "that  hat\n\tsat 12", "naïve 漢字 🙂 the"]
WORDS = ["▁the", "▁cat", "▁hat", "▁and", "at", "▁t", "he", "é", "漢字", "▁▁"]


def bytes_of(**special):
  """A byte-level BPE that learned words of a line; no text begins with bos."""
  inner = byte_level(("<s>", "<end>", "<tool>"))
  return checkpoints.Tokenizer(
    inner, special={"bos_token": "<s>", "eos_token": "<end>"} | special
  )


def pieces_of():
  """A SentencePiece BPE with byte tokens, whose texts begin with <bos>."""
  tokens = ["<bos>", "<eos>", "<tool>", "<other>"]
  tokens += [f"<0x{byte:02X}>" for byte in range(256)]
  tokens += ["▁", *"abcdehnst12", *WORDS]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  merges = [
    (word[:i], word[i:])
    for word in ["▁t", "he", "▁the", "at", "▁▁"]
    for i in range(1, len(word))
    if word[:i] in vocabulary and word[i:] in vocabulary
  ]
  inner = tokenizers.Tokenizer(
    models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True)
  )
  inner.normalizer = normalizers.Replace(" ", "▁")
  inner.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  inner.add_special_tokens(tokens[:4])
  inner.post_processor = processors.TemplateProcessing(
    single="<bos> $A", special_tokens=[("<bos>", 0)]
  )
  return checkpoints.Tokenizer(
    inner, special={"bos_token": "<bos>", "eos_token": "<eos>"}
  )


BYTES, PIECES = bytes_of(), pieces_of()
SIZES = {BYTES: BYTES.vocab_size, PIECES: PIECES.vocab_size}


def compare(target, draft, sizes=SIZES):
  return common_tokens(target, draft, sizes[target], sizes[draft])


def id_of(tokenizer, token):
  return tokenizer.tokens.index(token)


def spelled(found, draft, token):
  """The draft's tokens of one of the target's."""
  table = found.token_map
  pieces = table.pieces[table.start[token] : table.start[token + 1]]
  return [draft.tokens[piece] for piece in pieces]


@pytest.mark.parametrize("target, draft", [(BYTES, PIECES), (PIECES, BYTES)])
def test_any_text_is_spelled(target, draft):
  found = compare(target, draft)
  table = found.token_map
  for text in TEXTS:
    pieces = [
      piece
      for token in target.encode(text, add_special=False)
      for piece in table.pieces[table.start[token] : table.start[token + 1]]
    ]
    assert draft.decode(pieces) == text
  for token, other in enumerate(table.to_draft):
    if other >= 0:  # the invariant of what is kept of a draft
      assert spelled(found, draft, token) == [draft.tokens[other]]
  common = table.to_draft[table.to_draft >= 0]
  assert len(common) == len({*common.tolist()}) == found.num_common
  assert table.start[-1] == len(table.pieces)
  assert found.num_unspelled == np.sum(np.diff(table.start) == 0)


def test_the_map_is_one_to_one_and_the_same_both_ways():
  there = compare(BYTES, PIECES).token_map.to_draft
  back = compare(PIECES, BYTES).token_map.to_draft
  for token, other in enumerate(there):
    assert other < 0 or back[other] == token


@pytest.mark.parametrize(
  "token, pieces",
  [
    ("Ġthe", ["▁the"]),
    ("Ġ", ["▁"]),
    ("at", ["at"]),
    ("a", ["a"]),  # not its byte token
    ("Ċ", ["<0x0A>"]),
    ("Ã", ["<0xC3>"]),  # half a character
    ("<end>", ["<eos>"]),
    ("<tool>", ["<tool>"]),
    ("<s>", []),  # texts begin in another way
  ],
)
def test_tokens_of_bytes(token, pieces):
  found = compare(BYTES, PIECES)
  assert spelled(found, PIECES, id_of(BYTES, token)) == pieces


@pytest.mark.parametrize(
  "token, pieces, common",
  [
    ("▁the", ["Ġthe"], True),
    ("<0x61>", ["a"], False),  # the letter is
    ("<0x0A>", ["Ċ"], True),
    ("漢字", ["æ", "¼", "¢", "å", "Ń", "Ĺ"], False),
    ("<eos>", ["<end>"], True),
    ("<other>", ["<", "o", "the", "r", ">"], False),
    ("<bos>", [], False),
  ],
)
def test_tokens_of_pieces(token, pieces, common):
  found, number = compare(PIECES, BYTES), id_of(PIECES, token)
  assert spelled(found, BYTES, number) == pieces
  assert (found.token_map.to_draft[number] >= 0) == common


def test_texts_begin_as_the_draft_s_do():
  assert compare(BYTES, PIECES).token_map.prefix.tolist() == [0]
  assert compare(PIECES, BYTES).token_map.prefix.tolist() == []


def test_ids_without_an_embedding_are_left_out():
  most = SIZES[BYTES] - 5
  found = compare(PIECES, BYTES, SIZES | {BYTES: most})
  assert found.token_map.pieces.max() < most
  wide = compare(PIECES, BYTES, SIZES | {PIECES: SIZES[PIECES] + 3}).token_map
  assert wide.to_draft[-3:].tolist() == [-1] * 3
  assert np.all(np.diff(wide.start)[-3:] == 0)


def test_unigrams():
  """Of SentencePiece too, but without bytes: some tokens are nothing to it."""
  words = ["<unk>", "▁", *"achinstde", "▁the", "▁cat", "at", "\u00e9"]
  inner = tokenizers.Tokenizer(
    models.Unigram([(word, -len(words) / len(word)) for word in words], 0)
  )
  inner.decoder = decoders.Metaspace()
  inner.add_special_tokens(["<unk>"])
  draft = checkpoints.Tokenizer(inner)
  found = compare(BYTES, draft, SIZES | {draft: len(words)})
  for token, pieces in (
    ("Ġthe", ["▁the"]),
    ("Ġcat", ["▁cat"]),
    ("Ġand", ["▁", "a", "n", "d"]),
    ("x", []),
    ("Ã", []),
  ):
    assert spelled(found, draft, id_of(BYTES, token)) == pieces


def test_what_is_said():
  found = compare(PIECES, BYTES)
  share = found.num_common / SIZES[PIECES]
  assert str(found).startswith(
    f"{found.num_common} common tokens, {share:.0%} of the target's "
  )


def test_kinds_that_are_refused(monkeypatch):
  inner = tokenizers.Tokenizer(models.WordLevel({"the": 0, "cat": 1}, "the"))
  words = checkpoints.Tokenizer(inner)
  with pytest.raises(ValueError, match="of model WordLevel and decoder None: "):
    common_tokens(words, PIECES, 2, 300)
  monkeypatch.setattr(module, "LEAST", 0.999)
  with pytest.raises(ValueError, match="tokens in common, and at least 100% "):
    compare(PIECES, BYTES)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
  """A small decoder of a tokenizer that the package's models do not have."""
  folder = tmp_path_factory.mktemp("draft")
  config = dataclasses.replace(CONFIG, vocab_size=SIZES[PIECES])
  checkpoints.save_safetensors(folder, random_params(config), config)
  PIECES.save(folder)
  return folder


PROMPTS = ["import os\n", "def the", "x = 漢字", "return"]
SHORT = dict(target="stdlib-1m", k=2, prompt_size=16, max_new_tokens=12)


@pytest.mark.parametrize(
  "options",
  [
    {"temperature": 1.0},
    pytest.param(
      {"temperature": 0.0, "acceptance": "block"}, marks=pytest.mark.slow
    ),
    {"temperature": 1.0, "shape": "optimal(4, [0.5, 0.2])"},
  ],
)
def test_a_setup_decodes_the_text_of_the_target(draft, options):
  drafter = f"translated({draft}, room=3)"
  setup = Setup(**SHORT, drafter=drafter, batch=len(PROMPTS), **options)
  decoder = setup.load()
  [batch] = decoder.encode(PROMPTS)
  ours, theirs = (x.complete(batch) for x in (decoder, decoder.baseline()))
  assert ours.texts == theirs.texts
  assert ours.stats.drafted.sum() > 0


def test_the_memory_plan_knows_map_weights_and_room(draft):
  setup = Setup(**SHORT, drafter=f"translated({draft}, room=3)", batch=2)
  decoder = setup.load()
  cost, (weights, table) = decoder.drafter_cost, decoder.params.draft
  held, map_size = (
    sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (weights, table)
  )
  assert cost.weight_bytes - map_size == pytest.approx(held, rel=0.02)
  state = jax.eval_shape(lambda: decoder.start(Batch([], []))).draft_state
  cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
  position = cache / (2 * state.cache.num_slots) + 4
  assert cost.position_bytes == pytest.approx(3 * position, rel=0.01)
  assert state.text.tokens.shape == (2, 1 + 3 * decoder.max_length)
  plan = setup.memory_plan(setup.target_config())
  assert plan.parts["drafter"] == cost.weight_bytes


@pytest.mark.parametrize(
  "drafter, options, sentence",
  [
    ("model", {}, r"translated\(.*\) drafts with another tokenizer"),
    ("translated", {"random_weights": True}, "random weights have none"),
    ("translated", {"mesh": "model:1"}, "on one device, and there is a mesh"),
  ],
)
def test_what_does_not_fit_is_refused(draft, drafter, options, sentence):
  """Before weights are read; and the wrong drafter names the right one."""
  setup = Setup(**SHORT, drafter=f"{drafter}({draft})", **options)
  with pytest.raises(ValueError, match=sentence):
    setup.load_target()
