"""Published shapes of heads."""

import dataclasses
import json

import jax
import pytest

import programs
from specdec import drafters
from specdec.drafters.heads import head_presets
from specdec.models import presets

LLAMA = presets.get("llama3-8b", "bfloat16")


def weights(name):
  config = head_presets.get(name, LLAMA)
  make = drafters.LEARNED[config.kind]
  ids = range(config.vocabulary) if config.vocabulary else None
  head = make(config, LLAMA, ids and list(ids), None)
  return jax.tree.leaves(jax.eval_shape(head.init, jax.random.key(0)))


@pytest.mark.parametrize(
  "name, tensors, millions",
  [
    # The fusing map and two norms, 11 tensors a layer; five layers whose
    # projections of queries and keys are Llama's, 4096 to 14336 MLPs.
    ("dflash", 3 + 5 * 11, 5 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)) / 1e6
     + 5 * 4096**2 / 1e6),
  ],
)  # fmt: skip
def test_as_large_as_published(name, tensors, millions):
  leaves = weights(name)
  assert len(leaves) == tensors
  total = sum(leaf.size for leaf in leaves) / 1e6
  assert total == pytest.approx(millions, rel=1e-4)


def test_layers_of_the_published_drafters():
  # Qwen3-8B has 36 layers; DeepSpec reads what leaves 1, 9, 17, 25 and 33.
  qwen = dataclasses.replace(LLAMA, num_layers=36)
  assert head_presets.get("dspark", qwen).features == (2, 10, 18, 26, 34)
  assert head_presets.get("eagle3", LLAMA).features == (2, 16, 29)


def test_priced_and_in_want_of_weights(tmp_path):
  path = tmp_path / "prices.json"
  flags = "--chip=v6e", "--ways=1", "--target=llama3-8b", "--batches=1"
  flags += "--contexts=1024", "--most=7", "--alpha=0.8", f"--json={path}"
  programs.run("roofline", *flags, "--drafter=head(preset:dspark)")
  assert json.loads(path.read_text())
  with pytest.raises(SystemExit, match="--random_weights"):
    programs.run("generate", "--drafter=head(preset:dflash)", "--k=4")


def test_refused():
  with pytest.raises(ValueError, match="dflash"):
    head_presets.get("medusa", LLAMA)
  with pytest.raises(ValueError, match="at least 6"):
    head_presets.get("eagle3", dataclasses.replace(LLAMA, num_layers=4))
