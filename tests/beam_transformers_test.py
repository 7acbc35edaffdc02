"""Beam search finds the beams of transformers, token for token.

Slow, and skipped without torch and transformers; the models are the package's
own, T5s of random weights, and SmolLM2, which is fetched.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import programs
from specdec import beam, checkpoints, draft_shape, drafters
from specdec.checkpoints import fetch, shipped
from specdec.models import layouts, transformer
from specdec.types import Params, Source

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
torch.set_num_threads(1)  # its threads wait for one another on shared cores

HERE = pathlib.Path(__file__).parent
NEW, ROWS = 24, 20
SEARCHES = [
  beam.Search(1, 2.0, "never"),
  beam.Search(3, 0.0, "never"),
  beam.Search(4, 1.0, True),
  beam.Search(5, 2.0),
  beam.Search(8, 0.6),
]


def theirs(folder, prompts, search, eos, **options):
  """[(token ids, score)] lists of transformers, best first, one a prompt."""
  kind = transformers.AutoModelForCausalLM
  if "T5" in (pathlib.Path(folder) / "config.json").read_text():
    kind = transformers.AutoModelForSeq2SeqLM
  model = kind.from_pretrained(folder, dtype=torch.float32).eval()
  results = []
  for ids in prompts:
    with torch.no_grad():
      found = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
        num_beams=search.width,
        num_return_sequences=search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        do_sample=False,
        eos_token_id=list(eos),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **{"max_new_tokens": NEW} | options,
      )
    scores = [None] * search.width
    if search.width > 1:
      scores = found.sequences_scores.tolist()
    results.append([*zip(found.sequences.tolist(), scores)])
  return results


def compare(beams, expected, eos):
  best = jax.tree.map(np.asarray, beams.best)
  for row, answers in enumerate(expected):
    for i, (ids, score) in enumerate(answers):
      ours = best.tokens[row, i, : best.length[row, i]].tolist()
      assert ours == ids[: len(ours)], (row, i)
      assert {*ids[len(ours) :]} <= {0, eos[0]}, (row, i)  # padding
      if score is not None:
        assert best.scores[row, i] == pytest.approx(score, abs=2e-4)


@functools.cache
def smollm2():
  """A folder with SmolLM2 as Hugging Face lays it out."""
  folder = fetch.cache_folder() / "smollm2-135m-instruct-float32"
  if not folder.exists():
    source = "--source=smollm2-135m-instruct"
    programs.run("convert", source, f"--output={folder}")
  return folder


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("name", ["stdlib-11m", "smollm2"])
def test_a_decoder(search, name):
  if name == "smollm2":
    folder, new = smollm2(), 16
  else:
    folder, new = shipped.FOLDER / name, NEW
  checkpoint = checkpoints.load(folder)
  lines = (shipped.FOLDER / "prompts.jsonl").read_text().splitlines()
  texts = [json.loads(line)["prompt"] for line in lines[:ROWS]]
  prompts = [checkpoint.tokenizer.encode(text)[:40] for text in texts]
  [line] = checkpoint.tokenizer.encode("\n", add_special=False)
  eos = (line, 5)
  expected = theirs(folder, prompts, search, eos, max_new_tokens=new)
  size = max(map(len, prompts))
  prompt = np.zeros((ROWS, size), np.int32)
  for row, ids in enumerate(prompts):
    prompt[row, : len(ids)] = ids
  length = np.array([*map(len, prompts)])
  model = transformer.model(checkpoint.config)
  tree = drafters.quantized(model, shape=_tree())
  few = ROWS if name != "smollm2" else 3  # its trees take minutes
  for drafter, rows in ((None, ROWS), (tree, few)):
    found = beam.beam_search(
      model,
      Params(checkpoint.params, _drafting(drafter, checkpoint.params)),
      jnp.asarray(prompt[:rows]),
      jnp.asarray(length[:rows]),
      search,
      max_length=size + new,
      eos_ids=eos,
      limit=jnp.asarray(length[:rows] + new),
      **({"drafter": drafter} if drafter else {}),
    )
    compare(found, expected[:rows], eos)


def _tree():
  return draft_shape.dynamic(3, 3, 8)


def _drafting(drafter, params):
  return layouts.quantize(params) if drafter else None


def _sources(name):
  """A model's folder, ROWS sources for it, and its end token."""
  if name == shipped.T5:
    folder = shipped.FOLDER / name
    tokenizer = checkpoints.load_tokenizer(folder)
    lines = shipped.prompts_of(folder).read_text().splitlines()[:ROWS]
    texts = [json.loads(line)["prompt"] for line in lines]
    return folder, [tokenizer.encode(text) for text in texts], 0
  rng = np.random.default_rng(0)
  source = rng.integers(3, 64, (ROWS, 12), dtype=np.int32)
  length = rng.integers(1, 13, ROWS)
  prompts = [row[:n].tolist() for row, n in zip(source, length)]
  return HERE / "fixtures" / "parity" / name, prompts, 1


@pytest.mark.parametrize("name", ["t5", "t5_gated", shipped.T5])
@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_an_encoder_decoder(search, name):
  folder, prompts, end = _sources(name)
  checkpoint = checkpoints.load(folder)
  length = np.array([*map(len, prompts)])
  source = np.zeros((ROWS, length.max()), np.int32)
  for row, ids in enumerate(prompts):
    source[row, : len(ids)] = ids
  # With a cache it takes the decoder to have as many layers as the encoder.
  expected = theirs(folder, prompts, search, (end,), use_cache=False)
  model = transformer.model(checkpoint.config)
  for drafter in (None, drafters.model(model, shape=_tree())):
    found = beam.beam_search(
      model,
      Params(checkpoint.params, checkpoint.params),
      jnp.zeros((ROWS, 1), jnp.int32),
      jnp.ones((ROWS,), jnp.int32),
      search,
      max_length=1 + NEW,
      eos_ids=(end,),
      source=Source(jnp.asarray(source), jnp.asarray(length)),
      **({"drafter": drafter} if drafter else {}),
    )
    compare(found, expected, (end,))
