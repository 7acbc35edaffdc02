"""Models in the package: small, of one vocabulary, and useful as drafts."""

import json
import pathlib
import platform
import sysconfig

import pytest

import specdec
from specdec import checkpoints
from specdec.benchmark.batches import Batch
from specdec.checkpoints import learned, shipped
from specdec.checkpoints.fetch import fetch

MEGA = 10**6


def size(folder):
  return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())


def test_a_target_its_draft_and_three_more():
  drafts = [name for name in shipped.names() if name not in shipped.DRAFTS]
  assert shipped.DRAFT in drafts and len(drafts) >= 4
  folders = {name: fetch(name) for name in shipped.names()}
  assert all(size(folders[name]) < 3 * MEGA for name in drafts)
  around = [file for file in shipped.FOLDER.iterdir() if file.is_file()]
  pair = size(folders[shipped.TARGET]) + size(folders[shipped.DRAFT])
  assert pair + sum(file.stat().st_size for file in around) <= 26 * MEGA
  target, draft = (
    checkpoints.inspect(folders[name]).num_parameters
    for name in (shipped.TARGET, shipped.DRAFT)
  )
  assert 5 * MEGA <= target <= 13 * MEGA and 10 * draft <= target


def test_an_encoder_decoder_and_a_draft_a_tenth_of_it():
  folders = [fetch(name) for name in (shipped.T5, shipped.T5_DRAFT)]
  assert sum(map(size, folders)) < 12 * MEGA
  target, draft = map(checkpoints.inspect, folders)
  assert target.encoder_layers and draft.encoder_layers
  assert 5 * MEGA <= target.num_parameters <= 15 * MEGA
  assert 0.08 < draft.num_parameters / target.num_parameters < 0.12
  decoder = specdec.load(shipped.T5, prompt_size=128, max_new_tokens=48)
  assert decoder.drafter.spec.max_depth > 1
  # Texts end by themselves, where those of decoders are cut for timing.
  assert decoder.for_timing().eos_ids == decoder.eos_ids == (0,)
  tokenizer, ended = decoder.tokenizer, 0
  for task in ("docstring", "body"):
    lines = (folders[0] / f"{task}.jsonl").read_text().splitlines()
    assert len(lines) == 32
    sources = [json.loads(line)["prompt"] for line in lines[:3]]
    assert all(source.startswith(f"{task}: ") for source in sources)
    batch = [tokenizer.encode(source) for source in sources]
    for ids in batch:
      one = Batch([ids], [0])
      text = decoder.complete(one).texts[0]
      assert text == decoder.baseline().complete(one).texts[0]
      ended += text[-1] == 0
  assert ended > 0


def test_one_tokenizer_for_all(monkeypatch):
  files = sorted(shipped.FOLDER.rglob("tokenizer.json"))
  assert files == [shipped.TOKENIZER]
  text = "def main(argv=None):"
  ids = checkpoints.load_tokenizer(shipped.FOLDER / shipped.T5).encode(text)
  monkeypatch.chdir(shipped.FOLDER)  # and by a relative path
  assert checkpoints.load_tokenizer(shipped.TARGET).encode(text) == ids


def test_the_card_names_every_model():
  card = (shipped.FOLDER / "README.md").read_text()
  assert all(name in card for name in shipped.names())
  assert all(f"| {name} |" in card for name in shipped.drafters())


def test_prompts_end_in_functions_of_held_out_files():
  manifest = json.loads((shipped.FOLDER / "manifest.json").read_text())
  lines = shipped.PROMPTS.read_text().splitlines()
  texts = [json.loads(line)["prompt"] for line in lines]
  assert len(set(texts)) == 32
  assert all("def " in text.splitlines()[-1] for text in texts)
  if manifest["source"] != (
    f"standard library of CPython {platform.python_version()}"
  ):
    pytest.skip(f"another library than the {manifest['source']}")
  library = pathlib.Path(sysconfig.get_paths()["stdlib"])
  held_out = [(library / name).read_text() for name in manifest["held_out"]]
  train = [(library / name).read_text() for name in manifest["train"]]
  for text in texts:
    assert any(text in source for source in held_out)
    assert not any(text in source for source in train)


@pytest.fixture(scope="module")
def target():
  return checkpoints.load(fetch(shipped.TARGET))


def test_drafters_are_small_and_of_the_target(target):
  for name in shipped.drafters(shipped.TARGET):
    path = shipped.drafter(name)
    assert path.stat().st_size < MEGA
    assert learned.load(path, target).head_config.vocabulary > 0


def test_one_vocabulary(target):
  for name in shipped.names():
    tokenizer = checkpoints.load_tokenizer(fetch(name))
    assert checkpoints.same_vocabulary(target.tokenizer, tokenizer) is None
    assert tokenizer.eos_ids == (0,)


@pytest.mark.parametrize(
  "drafter, minimum",
  [("head(prophet)", 1.5), (f"model({shipped.DRAFT})", 1.3)],
)
def test_coupled_text_is_the_target_s_in_fewer_rounds(drafter, minimum):
  """Of a drafter that was trained for the target, and of a draft model."""
  decoder = specdec.load(drafter=drafter, k=4, max_new_tokens=48)
  [batch] = decoder.encode([shipped.PROMPT.read_text()])
  ours = decoder.complete(batch)
  assert ours.texts == decoder.baseline().complete(batch).texts
  assert ours.stats.emitted[0] / ours.stats.rounds[0] > minimum
