"""Suffix decoding and token recycling by name: corpora, hybrids, programs."""

import json

import pytest

import programs
from specdec.benchmark.decoder import Decoder
from specdec.benchmark.setup import Setup
from specdec.checkpoints import text_corpus
from specdec.drafters.fallback import Both
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.suffix_index import SuffixIndex

HEAD = dict(
  num_layers=1,
  width=16,
  mlp_width=24,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  head="shared",
)
FOLDER = "it's again"  # a call that names it is written with other quotes
SIZES = dict(k=3, prompt_size=64, max_new_tokens=24, batch=2)
PROMPTS = ["abcabcabc", "hello there"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  folder = programs.write_model(tmp_path_factory.mktemp("target"))
  programs.save_drafter(
    folder, folder / "head.safetensors", HeadConfig("mtp", **HEAD)
  )
  return folder


@pytest.fixture(scope="module")
def file(target):
  """A corpus of the target's own answers, by generate.py."""
  prompts = target / "prompts.jsonl"
  prompts.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in PROMPTS))
  path = target / "corpus.npz"
  programs.run(
    "generate",
    f"--target={target}",
    f"--prompt_file={prompts}",
    f"--save_corpus={path}",
    "--max_new_tokens=24",
    "--batch=2",
    "--drafter=suffix",
    "--k=2",
    "--repeats=1",
  )
  return path


def test_a_corpus_that_takes_no_texts_is_refused_before_any_is_written(
  target, tmp_path, monkeypatch
):
  def warm_up(*_):
    raise AssertionError("a decoder is compiled")

  monkeypatch.setattr(Decoder, "warm_up", warm_up)
  text_corpus.add(tmp_path / "other.npz", [[1]], 9)
  (tmp_path / "text.npz").write_text("a text")
  for name, sentence in (
    ("other.npz", "over 9 token ids"),
    ("text.npz", "no corpus of texts"),
  ):
    corpus = f"--save_corpus={tmp_path / name}"
    with pytest.raises(SystemExit, match=sentence):
      programs.run("generate", f"--target={target}", corpus, "--prompt=ab")


def texts(decoder):
  [batch] = decoder.encode(PROMPTS)
  return decoder.complete(batch)


def test_a_run_saves_what_it_wrote_and_another_copies_it(target, file):
  held = text_corpus.load(file, 27)
  assert len(held) == 2 and {len(x) - 24 for x in held} == {9, 11}
  setup = Setup(str(target), f"suffix(corpus='{file}')", **SIZES)
  decoder = setup.load()
  assert isinstance(decoder.params.draft, SuffixIndex)
  size = sum(len(x) + 1 for x in held)
  assert decoder.drafter_cost.weight_bytes == 8 * size
  ours, baseline = texts(decoder), texts(decoder.baseline())
  assert ours.texts == baseline.texts
  alone = texts(Setup(str(target), "suffix", **SIZES).load())
  assert alone.texts == baseline.texts
  # It has read all of it before: 24 tokens by four, one round to spare.
  assert ours.num_rounds <= 7 < alone.num_rounds
  assert file.name in str(setup.checksums())


def test_what_a_seed_wrote_is_copied_under_other_noise(target, file, tmp_path):
  """But for coupled rules, whose text is that of the seed: rule 7."""
  loaded = Setup(str(target)).load_target()
  larger = tmp_path / "larger.npz"
  larger.write_bytes(file.read_bytes())
  text_corpus.add(larger, [[1, 2, 3]], 27, loaded.checkpoint.tokenizer)

  def keys(drafter, acceptance="rejection"):
    setup = Setup(str(target), drafter, acceptance, temperature=1.0, **SIZES)
    return programs.keys_of(setup.decoder(loaded).key)

  alone, held, more = (
    keys(drafter)
    for drafter in (
      "suffix",
      f"suffix(corpus='{file}')",
      f"suffix(k=2, corpus='{larger}') | recycling",
    )
  )
  assert not (alone & held or alone & more or held & more)
  assert keys(f"suffix(corpus='{file}')", "coupled") == alone


@pytest.mark.parametrize(
  "first, other",
  [
    ("suffix(k=4, corpus='{}')", "head({}/head.safetensors)"),
    ("suffix(k=4)", "recycling"),
  ],
)
def test_hybrids(target, file, first, other):
  call = f"{first.format(file)} | {other.format(target)}"
  decoder = Setup(str(target), call, **SIZES).load()
  held = isinstance(decoder.params.draft, Both)
  assert held == ("corpus" in first)
  assert decoder.drafter_cost.is_complete or other == "recycling"
  assert texts(decoder).texts == texts(decoder.baseline()).texts


def test_recycling_in_trees(target):
  shape = "optimal(6, [0.5, 0.2])"
  setup = Setup(str(target), "recycling", shape=shape, **SIZES)
  decoder = setup.load()
  assert decoder.drafter_cost.row_bytes == 4 * 27 * 2
  ours, baseline = texts(decoder), texts(decoder.baseline())
  assert ours.texts == baseline.texts
  assert ours.stats.accepted.sum() > 0


def test_sampled_trees_are_deterministic_ones(target):
  for drafter, shape in (
    ("suffix", "dynamic(6)"),
    ("recycling", "optimal(6, [0.5, 0.2])"),
  ):
    setup = Setup(
      *(str(target), drafter, "rejection", shape), temperature=1.0, **SIZES
    )
    spec = setup.load().drafter.spec
    assert spec.siblings == "deterministic"


def test_corpora_of_others_are_refused_before_weights_are_read(
  target, tmp_path
):
  path = tmp_path / "other.npz"
  setup = Setup(str(target), f"suffix(corpus='{path}')", **SIZES)
  with pytest.raises(ValueError, match=r"No such file .*: .*other\.npz"):
    setup.check_sources()
  text_corpus.add(path, [[1, 2, 3]], 31)
  with pytest.raises(ValueError, match="over 31 token ids, and the target has"):
    setup.check_sources()


def test_the_same_prompts_again(target, file, tmp_path, capsys):
  longer = tmp_path / "prompts.jsonl"  # one of which is left out
  text = (target / "prompts.jsonl").read_text()
  longer.write_text(json.dumps({"prompt": "p" * 40}) + "\n" + text)
  programs.run(
    "repeat_work",
    f"--target={target}",
    f"--prompt_file={longer}",
    f"--output={tmp_path / FOLDER}",
    "--max_prompt_tokens=11",  # which prompts with an edit have not
    "--edit= thanks",
    "--max_new_tokens=16",
    "--k=3",
    "--batch=2",
  )
  document = json.loads((tmp_path / FOLDER / "results.json").read_text())
  runs = {run["group"]: run for run in document["runs"]}
  assert [*runs] == ["lookup", "suffix", "suffix and corpus"]
  for run in runs.values():
    assert run["identity"]["share"] == 1
    assert run["acceptance"]["emitted"] == 32
  prompts = (tmp_path / FOLDER / "edited.jsonl").read_text().splitlines()
  assert [json.loads(x)["prompt"] for x in prompts] == [
    f"{x} thanks" for x in PROMPTS
  ]
  held = text_corpus.load(tmp_path / FOLDER / "corpus.npz", 27)
  assert sorted(len(x) for x in held) == [9 + 16, 11 + 16]
  assert "suffix and corpus" in capsys.readouterr().out
