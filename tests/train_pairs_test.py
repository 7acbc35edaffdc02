"""Training of encoder-decoders: pairs, losses without padding, whole runs."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import programs
from specdec import checkpoints
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import (
  data,
  functions,
  objective,
  prompts,
  setup,
  train_drafter,
  train_model,
)
from specdec.training.options import Options
from specdec.types import Source
from tiny_training import DECODING, SHAPE, STEPS, log, write_letters

T5 = SHAPE | dict(
  num_kv_heads=2,
  encoder_layers=1,
  num_layers=2,
  relative_buckets=8,
  relative_distance=16,
  query_scalar=1.0,
  tied=True,
)
MODULE = '''
@decorated
def first(a,
          b):
  """Adds.

  Two.
    Indented.
  """
  # a comment
  return a + b

class C:
    def second(self):
        def inner(x):
            return x

        return inner  # not its docstring

    def third(self): return 0

    async def fourth(self):
        """Nothing else."""
'''


def test_functions_become_pairs(tmp_path):
  (tmp_path / "m.py").write_text(MODULE)
  (tmp_path / "n.py").write_text("def (")
  pairs = functions.pairs(tmp_path)
  assert pairs[0] == (
    "docstring",
    "docstring: def first(a,\n          b):\n  # a comment\n  return a + b\n",
    "Adds.\n\nTwo.\n  Indented.",
  )
  assert pairs[1].source.startswith('body: def first(a,\n          b):\n  """A')
  assert pairs[1].text == "  # a comment\n  return a + b"
  assert [tuple(pair) for pair in pairs[2:]] == [
    (
      "body",
      "body: def second(self):\n",
      "    def inner(x):\n        return x\n\n"
      "    return inner  # not its docstring",
    ),
    ("body", "body: def inner(x):\n", "    return x"),
  ]


def test_lines_are_those_that_python_counts(tmp_path):
  """Not ended by a form feed, nor by a separator inside a string."""
  module = (
    'def first():\n  """One."""\n  return "\u2028\x1c"\n\x0c\n'
    'def second():\n  """Two\x0b."""\n  return 2\n'
  )
  (tmp_path / "m.py").write_text(module)
  assert [tuple(pair) for pair in functions.pairs(tmp_path)] == [
    (
      "docstring",
      'docstring: def first():\n  return "\u2028\x1c"\n',
      "One.",
    ),
    (
      "body",
      'body: def first():\n  """One."""\n',
      '  return "\u2028\x1c"',
    ),
    ("docstring", "docstring: def second():\n  return 2\n", "Two\x0b."),
    ("body", 'body: def second():\n  """Two\x0b."""\n', "  return 2"),
  ]
  line = json.dumps({"text": "x = 1\rdef f():\r\n  return x\n"})
  (tmp_path / "mac.jsonl").write_text(line)
  (pair,) = functions.pairs(tmp_path / "mac.jsonl")
  assert pair.source == "body: def f():\r\n"


def test_decorators_of_a_body_s_first_function_are_its_own(tmp_path):
  (tmp_path / "m.py").write_text(
    "def outer(\n  a\n):\n"
    "  @wraps(\n    a\n  )\n  @again\n"
    "  def inner():\n    return a\n"
    "def one_line(a,\n  b): return a\n"
  )
  outer, inner = functions.pairs(tmp_path)
  assert outer.source == "body: def outer(\n  a\n):\n"
  assert outer.text.startswith("  @wraps(\n    a\n  )\n  @again\n  def inner()")
  assert inner.source == "body: def inner():\n"


def test_text_left_of_a_method_keeps_its_letters(tmp_path):
  (tmp_path / "m.py").write_text(
    'class A:\n    def f(self):\n        return """\nSELECT a\n  FROM b"""\n'
  )
  (pair,) = functions.pairs(tmp_path)
  assert pair.text == '    return """\nSELECT a\n  FROM b"""'


def test_prompts_end_behind_a_docstring(tmp_path):
  head = 'def f(a):\n  """Doc."""'
  body = "\n  a += 1\n  a += 2\n  a += 3\n  return a\n"
  (tmp_path / "m.py").write_text(f'"""m"""\nx = 1\n\x0c\n{head}{body}')
  (prompt,) = prompts.functions(tmp_path)
  assert prompt.endswith(f"\n\n{head}")


def test_questions_are_texts_and_lines_end_at_their_newlines(tmp_path):
  path = tmp_path / "q.jsonl"
  path.write_text('{"question": "a\u2028b"}\n')
  assert prompts.questions(path) == ["a\u2028b"]
  for value in ("null", "7", '""'):
    path.write_text(f'\n{{"question": {value}}}')
    with pytest.raises(ValueError, match=r"line 2 of .* has no question"):
      prompts.questions(path)


def test_no_beginning_is_a_prompt_twice(tmp_path):
  (tmp_path / "x.txt").write_text("b" * 10_000)
  assert prompts.beginnings(tmp_path) == ["b" * 160]


class Letters:
  """A tokenizer whose 26 tokens are letters; sources end with an `s`."""

  eos_ids, vocab_size = (25,), 26

  def encode(self, text, add_special=True):
    return [ord(x) - 97 for x in text] + [18] * add_special


def test_pairs_are_cut_and_padded():
  documents = [
    data.Document("a", "bcd", "efgh"),
    data.Document("b", "b", "e"),
    data.Document("c", "bcde", "ef"),
  ]
  options = Options(steps=9, batch=1, sequence=4, source=3, warmup=1)
  pairs = data.pair(documents, Letters(), 7, options)
  np.testing.assert_array_equal(
    pairs.tokens, [[7, 1, 2, 3, 25], [7, 1, 25, 25, 25], [7, 1, 2, 3, 4]]
  )
  np.testing.assert_array_equal(pairs.length, [4, 2, 4])
  np.testing.assert_array_equal(
    pairs.source.tokens, [[4, 5, 6], [4, 18, 25], [4, 5, 18]]
  )
  np.testing.assert_array_equal(pairs.source.length, [3, 2, 3])
  rows = data.Sequences(pairs)
  assert (rows.count, rows.length) == (3, 4)
  served = [int(rows.batch(i, 1).tokens[0, 2]) for i in range(3)]
  assert sorted(served) == [2, 2, 25]
  assert rows.evenly_spaced(2).length.tolist() == [4, 4]
  with pytest.raises(ValueError, match="b has no `source` and `text`"):
    alone = [documents[0], data.Document("b", "b")]
    data.pair(alone, Letters(), 7, options)


@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_padding_has_no_part_in_a_loss(loss):
  config = TransformerConfig(vocab_size=26, **T5)
  model = transformer.model(config)
  params, target = (
    jax.tree.map(lambda x: 8 * x, transformer.init_params(config, key))
    for key in jax.random.split(jax.random.key(0))
  )
  rng = np.random.default_rng(0)
  source = Source(rng.integers(0, 26, (2, 5)), np.array([5, 2]))
  batch = data.Pairs(source, rng.integers(0, 26, (2, 7)), np.array([6, 3]))
  distil = jax.jit(objective.distillation(model, model, loss))
  value, measures = distil(params, target, batch)
  other = jax.tree.map(np.array, batch)
  other.source.tokens[1, 2:] = 1
  other.tokens[1, 4:] = 1
  for name, measure in distil(params, target, other)[1].items():
    np.testing.assert_allclose(measure, measures[name], rtol=1e-5)
  # Row by row, without padding.
  sums = np.zeros(2)
  for row, (size, length) in enumerate([(5, 6), (2, 3)]):
    text = Source(source.tokens[row : row + 1, :size], np.array([size]))
    alone = batch.tokens[row : row + 1, : length + 1]
    single = data.Pairs(text, alone, np.array([length]))
    sums += length * np.array([distil(params, target, single)[0], 1 / length])
    changed = distil(params, target, single._replace(length=np.array([2])))[0]
    assert abs(changed - distil(params, target, single)[0]) > 1e-3
  np.testing.assert_allclose(value, sums[0] / 9, rtol=1e-5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  """Sources of letters, and texts that repeat them."""
  folder = tmp_path_factory.mktemp("texts")
  write_letters(folder / "letters")
  rng = np.random.default_rng(0)
  for name, count in (("train", 64), ("held_out", 8)):
    lines = []
    for _ in range(count):
      text = "".join(
        chr(97 + x) for x in rng.integers(0, 4, rng.integers(2, 7))
      )
      lines.append(json.dumps({"source": text, "text": text}) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(lines))
  return folder


def setup_of(texts, **entries):
  model = T5 | dict(
    vocab_size=checkpoints.load_tokenizer(texts / "letters").vocab_size
  )
  config = dict(
    tokenizer=str(texts / "letters"),
    data=str(texts / "train.jsonl"),
    held_out=str(texts / "held_out.jsonl"),
    model=model,
    options=STEPS | dict(source=8, sequence=8, learning_rate=0.02),
  )
  return setup.from_config(config | entries)


@pytest.mark.slow
def test_a_target_and_its_draft_are_trained(texts, tmp_path):
  train_model.load(setup_of(texts)).train(tmp_path / "target")
  held_out = [x["loss"] for x in log(tmp_path / "target", "held_out")]
  assert held_out[-1] < 0.9 * np.log(26)
  trained = checkpoints.load(tmp_path / "target" / "best")
  assert trained.config.encoder_layers == 1
  draft = setup_of(
    texts,
    target=str(tmp_path / "target" / "best"),
    loss="forward_kl",
    decoding=DECODING | dict(length=1),
  )
  train_model.load(draft).train(tmp_path / "draft")
  first, *_, last = log(tmp_path / "draft", "train")
  assert last["acceptance"] > first["acceptance"]
  assert log(tmp_path / "draft", "decoding")[-1]["tokens_per_pass"] >= 1
  seconds, *_ = train_model.load(setup_of(texts)).time_steps(1)
  assert seconds > 0


def test_refusals(texts, tmp_path):
  for changes, complaint in (
    (dict(options=STEPS), "an encoder needs the length of its sources"),
    (dict(head_config=None), "a target of joint training is a decoder"),
    (
      dict(
        target="target",
        loss="forward_kl",
        decoding=DECODING,
        samples=dict(count=9, prompt=2, temperature=1.0),
      ),
      "samples.count = 9: the texts of an encoder-decoder",
    ),
  ):
    with pytest.raises(ValueError, match=complaint):
      setup_of(texts, **changes)
  (tmp_path / "x.txt").write_text("a text")
  with pytest.raises(ValueError, match=r"x\.txt has no `source` and `text`"):
    train_model.load(setup_of(texts, data=str(tmp_path / "x.txt")))
  model = checkpoints.random_checkpoint(
    TransformerConfig(vocab_size=26, **T5), 0
  )
  checkpoints.save_safetensors(tmp_path / "t5", model.params, model.config)
  head = dict(kind="mtp", head="shared", **SHAPE)
  config = dataclasses.asdict(setup_of(texts))
  config = {name: config[name] for name in ("data", "held_out")}
  config |= dict(
    target=str(tmp_path / "t5"),
    head_config=head,
    loss=dict(divergence="forward_kl"),
    decoding=DECODING,
    options=STEPS,
  )
  with pytest.raises(ValueError, match="draft heads are trained on decoders"):
    train_drafter.train(setup.from_config(config), tmp_path / "run")


def test_prepared_pairs_are_read_back(tmp_path):
  for part in ("train", "held_out"):
    (tmp_path / "corpus" / part).mkdir(parents=True)
    (tmp_path / "corpus" / part / "m.py").write_text(MODULE)
  out = tmp_path / "pairs"
  programs.run(
    "prepare_data",
    "--make=pairs",
    f"--data={tmp_path / 'corpus'}",
    f"--output={out}",
  )
  documents = data.read(out / "train.jsonl")
  assert len(documents) == 4 and all(x.source for x in documents)
  for task, count in (("docstring", 1), ("body", 3)):
    lines = (out / f"{task}.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    assert [x["category"] for x in prompts] == [task] * count
    assert all(x["prompt"].startswith(f"{task}: def ") for x in prompts)
  (tmp_path / "corpus" / "held_out" / "m.py").write_text("a = 1\n")
  with pytest.raises(SystemExit, match="has no function with a docstring"):
    programs.run(
      "prepare_data",
      "--make=pairs",
      f"--data={tmp_path / 'corpus'}",
      f"--output={tmp_path / 'none'}",
    )
