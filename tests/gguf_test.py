"""GGUF files: weights, config and tokenizer against the Hugging Face path."""

import dataclasses
import functools
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from flax import traverse_util
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

from gguf_files import CONFIG, byte_level, permute, random_params, write
from specdec import checkpoints
from specdec.checkpoints import gguf as reading
from specdec.checkpoints import gguf_tokenizer
from specdec.models.rope_scaling import RopeScaling

PARITY = Path(__file__).parent / "fixtures" / "parity"
WINDOW = {"attention.sliding_window": 5}
HEADS = {"attention.key_length": 12, "rope.dimension_count": None}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def quantised(array, kind):
  if array.ndim < 2 or kind == Kind.F32:
    return array
  return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)


def test_the_length_that_a_model_is_for_is_read(tmp_path):
  write(tmp_path / "a.gguf", context_length=96)
  write(tmp_path / "b.gguf")
  lengths = [
    checkpoints.load(tmp_path / x).trained_length for x in ("a.gguf", "b.gguf")
  ]
  assert lengths == [96, None]


@pytest.mark.parametrize(
  "kind, tied",
  [(Kind.F32, True), (Kind.F16, False), (Kind.Q8_0, True), (Kind.Q4_0, False)],
)
def test_weights_are_dequantised_in_the_order_of_hugging_face(
  tmp_path, kind, tied
):
  config = dataclasses.replace(CONFIG, tied=tied)
  params = random_params(config)
  checkpoint = checkpoints.load(
    write(tmp_path / "m.gguf", params, config, kind)
  )
  assert checkpoint.config == config and checkpoint.tokenizer is None
  # Quantisation works along rows, so it commutes with reordering them.
  expected = {name: quantised(a, kind) for name, a in params.items()}
  loaded = traverse_util.flatten_dict(checkpoint.params, sep="/")
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)
  assert checkpoints.load(tmp_path, "bfloat16").config.dtype == "bfloat16"


EXPERTS = {"expert_count": 4, "expert_used_count": 2}


@pytest.mark.parametrize(
  "arch, name, changes, keys",
  [
    ("qwen2", "qwen2_window", {"windows": ()}, {}),
    ("qwen3", "qwen3", {}, {}),
    ("gemma2", "gemma2", {"query_scalar": 12},
     WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("gemma3", "gemma3", {"query_scalar": 12},
     WINDOW | LINEAR | {"attention.sliding_window_pattern": 3,
                        "rope.scaling.factor": 3.0,
                        "rope.freq_base_swa": 100.0}),
    ("smollm3", "smollm3", {"unrotated_layers": (3,), "windows": ()}, {}),
    ("olmo2", "olmo2", {}, {}),
    ("llama", "mixtral", {}, WINDOW | EXPERTS),
    ("qwen3moe", "qwen3_moe_normalized", {},
     {"feed_forward_length": 99, "expert_feed_forward_length": 16,
      "expert_count": 8, "expert_used_count": 3}),
  ],
)  # fmt: skip
def test_families_equal_the_hugging_face_path(
  tmp_path, arch, name, changes, keys
):
  recorded = checkpoints.load(PARITY / name)
  config = dataclasses.replace(recorded.config, **changes)
  params = jax.tree.map(np.asarray, recorded.params)
  params = traverse_util.flatten_dict(params, sep="/")
  keys = keys | {
    "attention.key_length": config.head_dim,
    "rope.freq_base": config.rope_theta,
    "rope.dimension_count": None,
  }
  path = write(tmp_path / "m.gguf", params, config, arch=arch, **keys)
  checkpoint = checkpoints.load(path)
  assert checkpoint.config == config
  loaded = traverse_util.flatten_dict(checkpoint.params, sep="/")
  assert loaded.keys() == params.keys()
  for key, value in params.items():
    # Where the file holds 1 + scale, scale keeps the absolute precision of 1.
    atol = 1.2e-7 * (config.norm_offset and key.endswith("/scale"))
    np.testing.assert_allclose(loaded[key], value, rtol=0, atol=atol)


def test_permutation_is_what_rotary_pairs_need():
  weight = np.arange(8.0)[:, None]  # one head: pair i is rows 2i, 2i + 1
  halves = reading.unpermute(weight, 1)
  np.testing.assert_array_equal(halves[:4, 0], [0, 2, 4, 6])
  np.testing.assert_array_equal(halves[4:, 0], [1, 3, 5, 7])
  weight = np.random.default_rng(0).normal(size=(24, 3))
  np.testing.assert_array_equal(
    reading.unpermute(permute(weight, 3), 3), weight
  )


@pytest.mark.parametrize(
  "keys, field, value",
  [
    ({"rope.freq_base": 5e5}, "rope_theta", 5e5),
    ({"rope.scale_linear": 2.0}, "rope_scaling", RopeScaling("linear", 2.0)),
    (LINEAR, "rope_scaling", RopeScaling("linear", 4.0)),
    ({"rope.scaling.type": "none"}, "rope_scaling", None),
    ({"attention.sliding_window": 7}, "windows", (7, 7)),
    ({"attention.key_length": 16}, "head_dim", 16),
    # What llama.cpp assumes where the file is silent.
    ({"arch": "gemma2"}, "windows", (4096, None)),
    ({"arch": "gemma2"}, "logit_softcap", 30.0),
    ({"arch": "gemma2", "block_count": 46} | HEADS, "query_scalar", 64 // 4),
    ({"arch": "gemma3", "block_count": 62} | HEADS, "query_scalar", 64 // 4),
    ({"arch": "gemma3"} | HEADS, "query_scalar", 12),
    ({"arch": "gemma3"}, "windows", ()),
    ({"arch": "gemma3"}, "local_rope_theta", None),
    ({"arch": "gemma3"} | WINDOW, "windows", (5, 5)),
    (
      {"arch": "gemma3", "attention.sliding_window_pattern": [False, True]}
      | WINDOW,
      "windows",
      (None, 5),
    ),
    ({"arch": "gemma3"} | WINDOW, "local_rope_theta", 10_000.0),
    ({"arch": "gemma3", "final_logit_softcapping": 7.0}, "logit_softcap", 7.0),
  ],
)
def test_metadata(tmp_path, keys, field, value):
  path = write(tmp_path / "m.gguf", **keys)
  assert getattr(checkpoints.inspect(path), field) == value


@pytest.mark.parametrize(
  "keys, sentence",
  [
    ({"arch": "falcon"}, "architecture 'falcon'; accepted: llama"),
    ({"rope.scaling.type": "yarn"}, "by 'yarn'; accepted: none, linear"),
    ({"expert_count": 8}, "expert_used_count = None; it must be a number"),
    ({"expert_gating_func": 2}, "llama.expert_gating_func, not implemented"),
    ({"block_count": None}, "block_count = None; it must be a number"),
    ({"block_count": 3}, "lacks blk.2.attn_norm.weight"),
    ({"block_count": 10**9}, "f: num_layers = 1,000,000,000; at m"),
    ({"block_count": 2.0}, "block_count = 2.0; it must be an integer"),
    (
      {"expert_count": 10**9, "expert_used_count": 2},
      "at most 131,072 experts",
    ),
    ({"rope.freq_base": float("nan")}, "freq_base = nan; it must be a number"),
    ({"block_count": 1}, "holds blk.1.*which this architecture"),
    ({"feed_forward_length": 95}, r"ffn_gate.* shape \(96, 64\).*\(95, 64\)"),
    ({"rope.dimension_count": 8}, "rope.dimension_count = 8; accepted: 16"),
    ({"arch": "phi3"}, "architecture 'phi3'; accepted: llama.*smollm3, olmo2"),
    ({"arch": "olmo2"} | WINDOW, "= 5 without specifying its layers"),
    ({"arch": "qwen3"} | WINDOW, "= 5 without specifying its layers"),
    ({"arch": "gemma2", "rope.freq_base_swa": 5.0}, "base_swa is not impleme"),
    ({"arch": "gemma3", "attention.scale": 0.5}, "on.scale, not implemented"),
  ],
)
def test_unsupported_metadata_is_refused(tmp_path, keys, sentence):
  path = write(tmp_path / "m.gguf", **keys)
  with pytest.raises(ValueError, match=sentence):
    checkpoints.load(path)


def test_llama3_factors(tmp_path):
  scaling = RopeScaling("llama3", 32.0)
  divisors = reading.llama3_divisors(scaling, 5e5, 16).astype(np.float32)
  assert divisors[0] == 1 and divisors[-1] == 32

  def scaling_with(values):
    def change(writer):
      writer.add_tensor("rope_freqs.weight", values)

    path = write(tmp_path / "m.gguf", change=change, **{"rope.freq_base": 5e5})
    return checkpoints.load(path).config.rope_scaling

  assert scaling_with(divisors) == scaling
  assert scaling_with(np.ones(8, np.float32)) is None
  with pytest.raises(ValueError, match="are not Llama 3's"):
    scaling_with(divisors + 1)


def test_damaged_files(tmp_path):
  whole = write(tmp_path / "m.gguf", change=sentence_piece()).read_bytes()
  path = tmp_path / "cut.gguf"
  inside = [whole.index(word) for word in (b"<0x41>", b"scores", b"token_type")]
  inside = [at + 60 for at in inside]  # in the midst of each long array
  for keep in (0, 3, 20, 100, *inside, len(whole) // 2, len(whole) - 40):
    path.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf is not a complete GGUF"):
      checkpoints.load(path)
  count = (10**9).to_bytes(8, "little")
  at = whole.index(b"scores") + 10
  arrays = whole[:at] + b"\x09\0\0\0" + count + whole[at + 12 :]
  for content in (whole[:8] + count + whole[16:], arrays):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"1,000,000,000 (tensors|of ARRAY)"):
      checkpoints.load(path)
  path.write_bytes(b"PK" + whole[2:])
  with pytest.raises(ValueError, match=r"not a complete GGUF file"):
    checkpoints.load(path)
  with pytest.raises(FileNotFoundError, match="does not exist"):
    checkpoints.load(tmp_path / "absent.gguf")


# Tokenizers.

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>")
TEXTS = [
  "",
  "the cat 1234 sat 56",
  " two  spaces\n\n\ttab ",
  "café 漢字 😀 it's",
  "<|im_start|>the<|im_start|> hat</s>",
]


@functools.cache
def smollm():
  digits = pre_tokenizers.Digits(individual_digits=True)
  return byte_level(SPECIALS, digits)


def metadata_of(model="gpt2", pre="smollm", eos=2, **flags):
  """Writes a trained tokenizer as a converter would, spare rows included."""
  inner = smollm()
  vocabulary = sorted(inner.get_vocab().items(), key=lambda item: item[1])
  tokens = [token for token, _ in vocabulary]
  merges = json.loads(inner.to_str())["model"]["merges"]
  types = [3 if token in SPECIALS else 1 for token in tokens]

  def change(writer):
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "[PAD0]", "[PAD1]"])
    writer.add_token_types([*types, 5, 5])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_eot_token_id(3)
    writer.add_chat_template(TEMPLATE)
    for name, value in flags.items():
      writer.add_bool(f"tokenizer.ggml.{name}", value)

  return change


def test_byte_level_from_metadata(tmp_path):
  inner = smollm()
  path = write(tmp_path / "m.gguf", change=metadata_of())
  original = checkpoints.Tokenizer(inner)
  rebuilt = checkpoints.load_tokenizer(path)
  assert checkpoints.same_vocabulary(original, rebuilt) is None
  for text in TEXTS:
    ids = rebuilt.encode(text)
    assert ids == original.encode(text)
    assert rebuilt.decode(ids, skip_special=False) == text
  assert rebuilt.encode("<|im_start|>") == [3]
  assert rebuilt.eos_ids == checkpoints.load(path).eos_ids == (2, 3)
  assert rebuilt.special["bos_token"] == "<s>"
  assert rebuilt.chat([{"role": "user", "content": "cat"}])[0] == 3


@pytest.fixture
def tokenizer_of(tmp_path):
  """A function from a change of a GGUF file to the tokenizer in it."""

  def load(change):
    return checkpoints.load_tokenizer(write(tmp_path / "m.gguf", change=change))

  return load


def test_bos_and_eos_are_added_as_the_file_says(tokenizer_of):
  flags = {"add_bos_token": True, "add_eos_token": True}
  tokenizer = tokenizer_of(metadata_of(**flags))
  baseline = smollm().encode("cat").ids
  assert tokenizer.encode("cat") == [1, *baseline, 2]
  assert tokenizer.encode("cat", add_special=False) == baseline
  assert tokenizer_of(metadata_of(pre="llama-bpe")).encode("")[0] == 1


@pytest.mark.parametrize(
  "pre, pieces",
  [
    ("smollm", 4),
    ("qwen2", 4),
    ("llama-bpe", 2),
    ("smaug-bpe", 2),
    ("dbrx", 2),
    ("gpt-2", 1),
  ],
)
def test_numbers_are_cut_as_each_kind_does(tokenizer_of, pre, pieces):
  options = gguf_tokenizer.PRE_TOKENIZERS[pre]
  assert len(options.split.pre_tokenize_str("1234")) == pieces
  tokenizer = tokenizer_of(metadata_of(pre=pre))
  for text in TEXTS[:-1]:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def sentence_piece(user_defined=(), **flags):
  words = ["▁", "t", "h", "e", "c", "a", "th", "▁t", "▁th", "the", "▁the", "ca"]
  tokens = ["<unk>", "<s>", "</s>"]
  tokens += [f"<0x{byte:02X}>" for byte in range(256)]
  types = [2, 3, 3] + [6] * 256 + [1] * len(words)
  scores = [0.0] * 259 + [-1e4] * 6 + [-1.0, -5.0, -2.0, -3.0, -4.0, -6.0]

  def change(writer):
    writer.add_tokenizer_model("llama")
    spare = len(user_defined)
    writer.add_token_list(tokens + words + list(user_defined))
    writer.add_token_types(types + [4] * spare)
    writer.add_token_scores(scores + [-1000.0] * spare)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in flags.items():
      writer.add_bool(f"tokenizer.ggml.{name}", value)

  return change


def pieces_of(tokenizer, text):
  return [tokenizer.tokens[i] for i in tokenizer.encode(text)]


def test_sentence_piece_from_scores(tokenizer_of):
  tokenizer = tokenizer_of(sentence_piece())
  pieces = functools.partial(pieces_of, tokenizer)
  assert pieces("the") == ["<s>", "▁the"]
  assert pieces("cathe") == ["<s>", "▁", "ca", "the"]
  assert pieces("é\n") == ["<s>", "▁", "<0xC3>", "<0xA9>", "<0x0A>"]
  for text in ("", " the", "the  cat é😀\n"):
    assert tokenizer.decode(tokenizer.encode(text)) == text
  flags = {"add_space_prefix": False, "add_bos_token": False}
  tokenizer = tokenizer_of(sentence_piece(**flags))
  assert pieces_of(tokenizer, "the") == ["the"]
  assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_user_defined_tokens_come_first_and_longest(tokenizer_of):
  """As in Gemma: runs of spaces and line ends, and no space before a text."""
  defined = ("  ", "   ", "\n\n", "<b>")
  tokenizer = tokenizer_of(sentence_piece(defined, add_space_prefix=False))
  pieces = functools.partial(pieces_of, tokenizer)
  # Not "▁", "▁the".
  assert pieces("the  the") == ["<s>", "the", "  ", "the"]
  assert pieces("     a") == ["<s>", "   ", "  ", "a"]
  assert pieces("<b>the\n\n\n") == ["<s>", "<b>", "the", "\n\n", "<0x0A>"]
  for text in ("the  the", " <b>     a\n\n\n"):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def altered(change, *removed, **arrays):
  """Metadata without some of its keys, and with other arrays."""

  def altered_change(writer):
    change(writer)
    for key in (*removed, *arrays):
      del writer.kv_data[0][f"tokenizer.ggml.{key}"]
    for key, values in arrays.items():
      writer.add_array(f"tokenizer.ggml.{key}", values)

  return altered_change


def test_tokenizers_that_are_refused(tokenizer_of):
  trained, scored = metadata_of(), sentence_piece()
  for change, sentence in (
    (metadata_of(model="t5"), "model 't5'; accepted: gpt2"),
    (metadata_of(pre="viking"), "pre = 'viking'; accepted"),
    (altered(trained, "pre"), "pre = 'default'; acc"),
    (altered(trained, "merges"), "without merges"),
    (altered(trained, "tokens"), "without tokens"),
    (altered(scored, "scores"), "without scores"),
    (metadata_of(eos=999), "eos_token_id = 999; it must be"),
    (altered(scored, "token_type", "tokens"), "without tok"),
    (altered(scored, tokens=[1, 2]), "tokens that is not a list of str"),
    (altered(scored, token_type=[1]), "tokens and 1 token types"),
  ):
    with pytest.raises(ValueError, match=sentence):
      tokenizer_of(change)
