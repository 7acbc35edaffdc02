"""Tokenizers: directories, chat templates, streaming and comparison."""

import functools
import json
import random

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from gguf_files import byte_level
from specdec import checkpoints
from specdec.checkpoints import chat_template
from specdec.checkpoints import tokenizer as wrapper

TEXTS = [
  "",
  " two  spaces\n\n\ttab ",
  "naïve café, déjà vu 1234",
  "漢字かな交じり文",
  "👩‍👩‍👧 family 😀 and 🇩🇪",
  "\u0000 \ufffd lone \u200d",
]
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
  {% if message.role == 'tool' %}
    {{ raise_exception('no tools') }}
  {% endif %}
<|{{ message.role }}|>{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{%- endif %}"""


SPECIALS = ("<s>", "<|end|>", "<|user|>", "<|assistant|>")
train = functools.partial(byte_level, SPECIALS)


@pytest.fixture
def directory(tmp_path):
  inner = train()
  inner.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
  )
  inner.enable_truncation(3)  # must not survive loading
  inner.save(str(tmp_path / "tokenizer.json"))
  write(
    tmp_path / "tokenizer_config.json",
    bos_token={"content": "<s>", "lstrip": False},
    eos_token="<|end|>",
    pad_token=None,
    chat_template=TEMPLATE,
  )
  return tmp_path


def write(path, **content):
  path.write_text(json.dumps(content))


def test_encode_and_decode(directory):
  tokenizer = checkpoints.load_tokenizer(directory)
  for text in TEXTS:
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert tokenizer.encode(text, add_special=False) == ids[1:]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=False) == "<s>" + text
  assert tokenizer.vocab_size == len(tokenizer.tokens) > 260
  assert tokenizer.tokens[tokenizer.eos_ids[0]] == "<|end|>"


@pytest.mark.parametrize(
  "files, eos_ids",
  [
    ({"generation_config.json": [7, 9], "config.json": 8}, (7, 9)),
    ({"generation_config.json": None, "config.json": 8}, (8,)),
    ({}, (1,)),
  ],
)
def test_eos_comes_from_the_first_file_that_says(directory, files, eos_ids):
  for name, value in files.items():
    write(directory / name, eos_token_id=value)
  assert checkpoints.load_tokenizer(directory).eos_ids == eos_ids


def test_chat(directory):
  tokenizer = checkpoints.load_tokenizer(directory)
  messages = [{"role": "user", "content": "the hat"}]
  text = "<s><|user|>the hat<|end|>\n<|assistant|>"
  ids = tokenizer.chat(messages)
  assert tokenizer.decode(ids, skip_special=False) == text
  assert ids == tokenizer.encode(text, add_special=False)
  with pytest.raises(ValueError, match="chat template failed: no tools"):
    tokenizer.chat([{"role": "tool", "content": ""}])


def test_the_template_is_the_file_s_or_the_one_named_default(directory):
  templates = [{"name": "default", "template": "x{{ bos_token }}"}]
  write(directory / "tokenizer_config.json", chat_template=templates)
  tokenizer = checkpoints.load_tokenizer(directory)
  assert tokenizer.decode(tokenizer.chat([])) == "x"
  template = "{{ messages | tojson }}{{ strftime_now('%%') }}"
  (directory / "chat_template.jinja").write_text(template)
  tokenizer = checkpoints.load_tokenizer(directory)
  messages = [{"role": "user", "content": "<é>"}]
  text = '[{"role": "user", "content": "<é>"}]%'
  assert tokenizer.decode(tokenizer.chat(messages)) == text


@pytest.mark.parametrize(
  "template, sentence",
  [
    (None, "no chat template"),
    ([{"name": "tool_use", "template": ""}], "no chat template"),
    ("{% for %}", "the chat template failed"),
    ("{{ ''.__class__.__mro__ }}", "the chat template failed: access to"),
    ("{{ messages.append(1) }}", "the chat template failed: access to"),
    ("{{ 1 // 0 }}", "the chat template failed: .*by zero"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: .*recursion"),
    ("{{ 'x' * 10 ** 9 }}", "failed: MemoryError"),
    (
      "{% set a = 7**3000000 %}{{ (a // 7**1500000) % 10 }}",
      "failed: (it ran for more than|Exceeds the limit)",
    ),
    ("{{ '%1500000000d' % 1 }}", "failed: MemoryError"),
    (7, "chat_template = 7; it must be a string"),
  ],
)
def test_bad_chat_templates(directory, template, sentence, monkeypatch):
  monkeypatch.setattr(chat_template, "_SECONDS", 3.0)
  write(directory / "tokenizer_config.json", chat_template=template)
  with pytest.raises(ValueError, match=sentence):
    tokenizer = checkpoints.load_tokenizer(directory)
    tokenizer.chat([{"role": "user", "content": "hi"}])


def test_an_endless_chat_template_is_stopped(directory, monkeypatch):
  monkeypatch.setattr(chat_template, "_SECONDS", 1.0)
  numbers = "{% for _ in range(99999) %}"
  template = 3 * numbers + 3 * "{% endfor %}"
  write(directory / "tokenizer_config.json", chat_template=template)
  tokenizer = checkpoints.load_tokenizer(directory)
  with pytest.raises(ValueError, match="failed: it ran for more than 1 s"):
    tokenizer.chat([{"role": "user", "content": "hi"}])
  tokenizer.chat_template = "{{ messages[0].content }}"
  message = {"role": "user", "content": "a\nb"}
  for _ in range(2):
    assert tokenizer.decode(tokenizer.chat([message])) == "a\nb"


@pytest.mark.parametrize(
  "template, text",
  [
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
    ("{% if tools is not none %}no{% endif %}{{ documents }}", "None"),
    (
      "{{ {'b': '<\u00e9', 'a': 1}"
      " | tojson(ensure_ascii=true, sort_keys=true) }}",
      '{"a": 1, "b": "<\\u00e9"}',
    ),
  ],
)
def test_templates_as_transformers_renders_them(directory, template, text):
  write(directory / "tokenizer_config.json", chat_template=template)
  tokenizer = checkpoints.load_tokenizer(directory)
  chat = tokenizer.chat([{"role": "user", "content": "hi"}])
  assert tokenizer.decode(chat) == text


def test_what_was_interrupted_is_not_the_next_answer(directory, monkeypatch):
  template = "{{ messages[0].content }}"
  write(directory / "tokenizer_config.json", chat_template=template)
  tokenizer = checkpoints.load_tokenizer(directory)

  def interrupted(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(chat_template.select, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
      tokenizer.chat([{"role": "user", "content": "first"}])
  second = tokenizer.chat([{"role": "user", "content": "second"}])
  assert tokenizer.decode(second) == "second"


@pytest.mark.parametrize(
  "name, entries, sentence",
  [
    (
      "tokenizer",
      {"bos_token": [1]},
      r"config.json has bos_token = \[1\]; it m",
    ),
    ("tokenizer", {"eos_token": "<|none|>"}, r"ends texts with '<\|none\|>'"),
    ("generation", {"eos_token_id": "x"}, "n has eos_token_id = 'x'; it must"),
    ("generation", {"eos_token_id": [2**31]}, "n has eos_token_id = 214"),
  ],
)
def test_invalid_special_tokens_are_refused(directory, name, entries, sentence):
  write(directory / f"{name}_config.json", **entries)
  with pytest.raises(ValueError, match=sentence):
    checkpoints.load_tokenizer(directory)


def test_damaged_and_absent(directory):
  (directory / "tokenizer.json").write_text('{"model": 3}')
  with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
    checkpoints.load_tokenizer(directory)
  (directory / "tokenizer.json").unlink()
  assert wrapper.from_directory(directory) is None
  with pytest.raises(FileNotFoundError):
    checkpoints.load_tokenizer(directory)


def test_texts_without_embeddings_or_utf8_are_refused(directory):
  size = checkpoints.load_tokenizer(directory).vocab_size
  tokenizer = wrapper.from_directory(directory, limit=size - 1)
  assert tokenizer.encode("c")
  with pytest.raises(ValueError, match=f"has id {size - 1}; the model's"):
    tokenizer.encode(tokenizer.decode([size - 1]))
  with pytest.raises(ValueError, match="half of a surrogate pair, at char"):
    tokenizer.encode("a\ud800")


def metaspace():
  """A SentencePiece-like decoder: it eats the space before the first word."""
  words = ["▁the", "▁cat", "s", "▁", "<s>"]
  vocab = {token: i for i, token in enumerate(words)}
  for byte in range(256):
    vocab[f"<0x{byte:02X}>"] = len(vocab)
  inner = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
  inner.add_special_tokens(["<s>"])
  inner.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  return inner


def in_pieces(tokenizer, ids, rng):
  stream = checkpoints.TextStream(tokenizer)
  pieces, start = [], 0
  while start < len(ids):
    stop = start + rng.randrange(1, 5)
    pieces.append(stream.push(ids[start:stop]))
    start = stop
  pieces.append(stream.finish())
  assert stream.finish() == ""
  return "".join(pieces)


@pytest.mark.parametrize("make", [train, metaspace])
def test_stream_equals_decode(make):
  tokenizer = checkpoints.Tokenizer(make())
  rng = random.Random(0)
  words = [tokenizer.encode(c, add_special=False) for c in "aé漢😀 \n1"]
  words += [[index] for index in range(5)]  # words, and the special ones
  texts = [tokenizer.encode(text, add_special=False) for text in TEXTS]
  for _ in range(300):
    texts.append([i for word in rng.choices(words, k=20) for i in word])
  for ids in texts:
    assert in_pieces(tokenizer, ids, rng) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [train, metaspace])
def test_stream_of_broken_bytes(make):
  tokenizer = checkpoints.Tokenizer(make())
  rng = random.Random(0)
  for _ in range(300):
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20)]
    text = in_pieces(tokenizer, ids, rng)
    if make is train:
      assert text == tokenizer.decode(ids)
  # What was whole before a byte run broke stays as it was given.
  tokenizer = checkpoints.Tokenizer(metaspace())
  ids = tokenizer.encode("é", add_special=False)
  stream = checkpoints.TextStream(tokenizer)
  pieces = [stream.push([i]) for i in ids + ids[:1] + [0]]
  assert pieces == ["", "é", "", "\ufffd the"]


def test_stream_holds_back_half_a_character():
  tokenizer = checkpoints.Tokenizer(train())
  ids = tokenizer.encode("a😀b", add_special=False)
  stream = checkpoints.TextStream(tokenizer)
  assert [stream.push([index]) for index in ids] == ["a", "", "", "", "😀", "b"]
  stream.push(ids[:3])
  assert stream.finish() == "\ufffd"


def test_same_vocabulary():
  same = checkpoints.same_vocabulary
  a = checkpoints.Tokenizer(train())
  assert same(a, checkpoints.Tokenizer(train())) is None
  b = checkpoints.Tokenizer(byte_level(("<s>", "<|stop|>", *SPECIALS[2:])))
  assert b.vocab_size == a.vocab_size
  difference = "token 1 is '<|end|>' in one and '<|stop|>' in the other"
  assert same(a, b) == difference
  longer = train()
  longer.add_tokens(["extra"])
  sentence = same(a, checkpoints.Tokenizer(longer))
  size = a.vocab_size
  assert sentence == (
    f"one has {size} tokens and the other {size + 1}: token {size}, 'extra', "
    "is in one only"
  )
