"""Feeds damaged files, prompts and flags to every reader: each case ends in one
sentence that names what was wrong, or works.

2,000 cases, the same ones every time. SPECDEC_FUZZ=10 runs ten times as many.
"""

import copy
import json
import os
import random
import re
import shutil
import signal
import struct
import traceback

import numpy as np
import pytest

import gguf_files
import programs
from specdec import checkpoints
from specdec.benchmark import prompts
from specdec.benchmark.setup import Setup
from specdec.checkpoints import learned, shipped
from specdec.cli import app, generate
from specdec.drafters.heads.head_config import HeadConfig

pytestmark = pytest.mark.slow
TIMES = int(os.environ.get("SPECDEC_FUZZ", "1"))
SECONDS = 60  # that a case may take
PARITY = programs.SCRIPTS.parent / "tests" / "fixtures" / "parity"
FAMILIES = sorted(path.name for path in PARITY.iterdir())
NESTED = json.loads("[" * 60 + "]" * 60)
VALUES = (
  *(None, True, False, -1, 0, 1, 2, 3, 0.5, 1e-30, 10**9, 10**19, 10**400),
  *(float("inf"), float("nan"), "", "x", "\ud800", "x" * 20_000),
  *([], [1], ["x"], [None], {}, {"x": {}}, NESTED),
)
CHAT = re.compile("the chat template failed: .|the text holds .*surrogate")
TEXTS = ("", "0", "-1", "x", "nan", "inf", "1e400", "1e9", "1" * 30, "1-9", ",")
TEXTS += ("1-300000000", "1000000", ":", "x:y", "1:2:3", "\udcff", "None", "[]")


class Slow(BaseException):
  """A case took too long."""


class Enough(BaseException):
  """A program got as far as decoding."""


def ends_well(action, named: str) -> str | None:
  """None where `action` works or raises a sentence with `named` in it, else
  what went wrong."""

  def late(*_):
    raise Slow(f"over {SECONDS} s")

  signal.signal(signal.SIGALRM, late)
  signal.alarm(SECONDS)
  try:
    action()
  except Enough:
    pass
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    if isinstance(error, SystemExit):
      named, error = "", error.__context__  # main has written it down
    expected = type(error) in (ValueError, MemoryError)
    expected |= isinstance(error, OSError)
    named = named if not CHAT.match(str(error)) else ""
    if not expected or named not in str(error) or not str(error):
      where = traceback.extract_tb(error.__traceback__)[-1]
      text = f"{type(error).__name__}: {str(error)[:150]!r}"
      return f"{text} at {os.path.basename(where.filename)}:{where.lineno}"
  finally:
    signal.alarm(0)
  return None


def check(cases: int, one) -> None:
  """Runs `one(rng)` -> (description, action, name) so many times."""
  faults = []
  for case in range(cases * TIMES):
    described, action, named = one(random.Random(case))
    fault = ends_well(action, named)
    if fault:
      faults.append(f"case {case}, {str(described)[:150]}: {fault}")
  shown = "\n".join(faults[:40])
  assert not faults, f"{len(faults)} of {cases * TIMES}:\n{shown}"


def places(node, path=()):
  """Paths into a JSON document; of long lists and dicts some entries."""
  if path:
    yield path
  if isinstance(node, dict | list):
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    for key in keys[:40]:
      yield from places(node[key], (*path, key))


def mutated(document, rng):
  """(what was done, the document with one entry gone or replaced)."""
  document = copy.deepcopy(document)
  *path, last = rng.choice(list(places(document)))
  node = document
  for key in path:
    node = node[key]
  if rng.random() < 0.15:
    del node[last]
    return f"without {[*path, last]}", document
  node[last] = rng.choice(VALUES)
  return f"{[*path, last]} = {node[last]!r:.50}", document


def damaged(data: bytes, rng, header: int) -> bytes:
  """The bytes with a piece cut, replaced or inserted, mostly in the header."""
  at = rng.randrange(header if rng.random() < 0.9 else len(data))
  words = (0, 2**64 - 1, 10**9, 2**63, 2**31, 1, rng.randrange(2**64))
  word = struct.pack("<Q", rng.choice(words))[: rng.choice((1, 4, 8))]
  kind = rng.randrange(4)
  if kind == 0:
    return data[:at]
  if kind == 1:
    return data[:at] + word + data[at:]
  return data[:at] + word + data[at + (len(word) if kind > 1 else 0) :]


def use(path) -> None:
  """Loads a model and asks for what programs ask of it."""
  checkpoints.inspect(path)
  checkpoint = checkpoints.load(path)
  assert checkpoint.config.num_parameters < 10**7
  assert all(0 <= index < 2**31 for index in checkpoint.eos_ids)
  if checkpoint.tokenizer:
    ids = checkpoint.tokenizer.encode("def f(x):")
    assert isinstance(checkpoint.tokenizer.decode(ids), str)
    if checkpoint.tokenizer.chat_template is not None:
      checkpoint.tokenizer.chat([{"role": "user", "content": "a"}])


@pytest.fixture
def model(tmp_path):
  """A small model of every file that directories have."""
  folder = tmp_path / "model"
  shutil.copytree(shipped.FOLDER / "stdlib-0.3m", folder)
  path = folder / "tokenizer_config.json"
  about = json.loads(path.read_text())
  about["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
  path.write_text(json.dumps(about))
  index = {"metadata": {}, "weight_map": {"x": "model.safetensors"}}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


def test_configs(tmp_path):
  shutil.copytree(PARITY, tmp_path, dirs_exist_ok=True)

  def one(rng):
    name = rng.choice(FAMILIES)
    document = json.loads((PARITY / name / "config.json").read_text())
    change, document = mutated(document, rng)
    text = json.dumps(document)
    (tmp_path / name / "config.json").write_text(text)
    return f"{name}: {change}", lambda: use(tmp_path / name), str(tmp_path)

  check(700, one)


def test_other_json(model):
  files = sorted(path for path in model.glob("*.json"))
  whole = {path: path.read_text() for path in files}

  def one(rng):
    for path in files:
      path.write_text(whole[path])
    path = rng.choice(files)
    if rng.random() < 0.1:
      data = damaged(whole[path].encode(), rng, len(whole[path]))
      path.write_bytes(data)
      change = "damaged"
    else:
      change, document = mutated(json.loads(whole[path]), rng)
      path.write_text(json.dumps(document))
    return f"{path.name}: {change}", lambda: use(model), str(model)

  check(300, one)


def test_safetensors_and_drafters(tmp_path):
  target = programs.write_model(tmp_path)
  weights, drafter = tmp_path / "model.safetensors", tmp_path / "d.safetensors"
  head_configs = [
    HeadConfig("eagle3", features=(1,), levels=2),
    HeadConfig("medusa", num_layers=0, levels=2),
    HeadConfig("exit", exit_layer=1, feeds_back_hidden=True),
  ]
  files = []
  for head_config in head_configs:
    small = dict(width=16, mlp_width=16, num_heads=2, head_dim=8)
    head_config = HeadConfig(**(vars(head_config) | small))
    programs.save_drafter(target, drafter, head_config)
    files.append(drafter.read_bytes())
  whole, checkpoint = weights.read_bytes(), checkpoints.load(target)

  def one(rng):
    kind = rng.randrange(4)
    data = whole if kind == 0 else rng.choice(files)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if kind < 2:
      change, data = "damaged", damaged(data, rng, end)
    else:
      if kind == 2:
        change, header = mutated(header, rng)
      else:
        about = json.loads(header["__metadata__"]["specdec"])
        change, about = mutated(about, rng)
        header["__metadata__"]["specdec"] = json.dumps(about)
      text = json.dumps(header).encode()
      data = struct.pack("<Q", len(text)) + text + data[end:]
    weights.write_bytes(data if kind == 0 else whole)
    if kind == 0:
      return change, lambda: use(tmp_path), str(tmp_path)
    drafter.write_bytes(data)

    def draft():
      learned.inspect(drafter)
      learned.load(drafter, checkpoint)

    return change, draft, str(drafter)

  check(300, one)


def tokenized(writer) -> None:
  """A byte-level tokenizer's metadata."""
  letters = [chr(i) for i in range(ord("a"), ord("a") + 26)]
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  writer.add_token_list([*letters, "ab", "cd", "<s>", "(", ")", ":"])
  writer.add_token_types([1] * 28 + [3] + [1] * 3)
  writer.add_token_merges(["a b", "c d"])
  writer.add_eos_token_id(28)
  writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_gguf(tmp_path):
  path = tmp_path / "m.gguf"
  whole = gguf_files.write(path, change=tokenized).read_bytes()
  header = whole.index(b"output_norm.weight") + 200
  keys = ["block_count", "embedding_length", "feed_forward_length"]
  keys += ["attention.head_count", "attention.head_count_kv", "expert_count"]
  keys += ["rope.dimension_count", "rope.freq_base", "attention.key_length"]
  keys += ["attention.sliding_window", "rope.scaling.factor"]
  values = (None, "x", 0, 1, 10**9, 2**32 - 1, 0.5, float("nan"), float("inf"))

  def one(rng):
    if rng.random() < 0.7:
      path.write_bytes(damaged(whole, rng, header))
      return "damaged", lambda: use(path), str(path)
    changes = {rng.choice(keys): rng.choice(values) for _ in range(2)}
    gguf_files.write(path, change=tokenized, **changes)
    return changes, lambda: use(path), str(path)

  with np.errstate(all="ignore"):
    check(300, one)


def test_prompts(tmp_path):
  path = tmp_path / "p.jsonl"
  text = checkpoints.load_tokenizer(shipped.FOLDER / "stdlib-0.3m")
  good = {"prompt": "def f", "turns": ["a"], "category": "c"}

  def one(rng):
    entry = rng.choice((good, {"token_ids": [1, 2], "question_id": 1}))
    change, document = mutated(entry, rng)
    line = json.dumps(document).encode()
    if rng.random() < 0.3:
      change, line = "damaged", damaged(line, rng, len(line))
    if rng.random() < 0.1:
      change, line = "deep", b'{"prompt": ' + b"[" * 10**5
    path.write_bytes(json.dumps(good).encode() + b"\n" + line)

    def read():
      entries, _ = prompts.scan(path)
      assert entries[0].text == "def f"
      for prompt in entries:
        prompts.encode([prompt], text, False, 4096)

    return change, read, "prompt 0"

  check(200, one)


def test_flags(tmp_path, monkeypatch):
  def enough(*_, **__):
    raise Enough

  programs.fake_machine(monkeypatch)
  monkeypatch.setattr(Setup, "decoder", enough)
  monkeypatch.chdir(tmp_path)  # some flags name what is written
  folder = programs.write_model(tmp_path / "model")
  defined = app.Flags(["generate"])
  generate.define(defined)
  kinds = {name: defined.values[name].flag_type() for name in defined.values}
  names = sorted({*kinds} - {"config", "distributed", "coordinator"})
  names += 4 * ["k", "shape", "mesh", "acceptance", "batch", "drafter"]
  calls = {
    "shape": ["chains", "optimal", "dynamic", "chain", "paths"],
    "drafter": [
      "lookup",
      "model",
      "early_exit",
      "layer_skip",
      "recycling",
      "suffix",
      "head",
      "x.py:f",
    ],
    "acceptance": ["synthetic", "typical", "relaxed", "lenience", "rejection"],
  }

  def one(rng):
    given = {"target": folder}
    for name in (rng.choice(names), rng.choice(names)):
      value = rng.choice(TEXTS)
      if kinds[name] == "bool":
        value = rng.choice(("true", "false"))
      if name in calls:
        value = f"{rng.choice(calls[name])}({value})"
      given[name] = value
    given = [f"--{name}={value}" for name, value in given.items()]
    return given, lambda: programs.run("generate", *given), ""

  check(200, one)
