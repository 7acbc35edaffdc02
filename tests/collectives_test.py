"""Drafting exchanges as often as the programs that were compiled for a TPU."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from specdec import drafters
from specdec.drafters.heads import cost as head_cost
from specdec.drafters.heads import head_presets
from specdec.models import presets
from specdec.roofline import chips, drafter_cost, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost

RESULTS = pathlib.Path(__file__).parents[1] / "results"
# An all-reduce takes a second; all else takes no time.
COUNTING = dataclasses.replace(
  chips.get("v5e"), axes=0, hop_seconds=0.5, link_bandwidth=math.inf
)
WAYS = 8


def compiled(name):
  """The all-reduces of the draft step of a document, and their bytes."""
  document = json.loads((RESULTS / f"{name}.json").read_text())
  [draft] = (x for x in document["steps"] if x["step"] == "draft")
  assert draft["collectives"].keys() == {"all-reduce"}
  return document["settings"], *draft["collectives"]["all-reduce"]


def exchanged(target, cost, k, batch=1):
  """The same by the cost model."""
  deployment = Deployment(shapes.of_config(target), COUNTING, ways=WAYS)
  drafting = round_cost(deployment, cost, k, batch, 100).only("draft")
  seconds = sum(
    times * term.seconds
    for _, times, part in drafting.parts
    for term in part.terms
    if term.name == "collectives"
  )
  return seconds, drafting.sent * WAYS / (2 * (WAYS - 1))


@pytest.mark.parametrize("name", ["8b", "70b_v6e", "70b_v5p"])
def test_a_draft_model_exchanges_as_its_compiled_program_does(name):
  settings, count, size = compiled(f"tpu_{name}")
  target = presets.get(f"llama3-{name.partition('_')[0]}", "bfloat16")
  cost = drafter_cost.model(presets.get("llama3-1b", "bfloat16"))
  [k], [batch] = settings["k"], settings["batch"]
  # Of the tokens that it catches up with only the last one's logits.
  ours = exchanged(target, cost, k, batch)
  assert ours == (pytest.approx(count), pytest.approx(size, rel=1e-4))


@pytest.mark.parametrize("ways", [1, 8])
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_head_exchanges_as_its_compiled_program_does(name, ways):
  settings, count, size = compiled(f"tpu_{name}" + "_shared" * (ways > 1))
  target = presets.get("llama3-8b", "bfloat16")
  config = head_presets.get(name, target)
  ids = np.arange(config.vocabulary) if config.vocabulary else None
  head = drafters.LEARNED[config.kind](config, target, ids)
  [k], [batch] = settings["k"], settings["batch"]
  cost = head_cost.drafter_cost(head, target, ways=ways)
  times, sent = exchanged(target, cost, k, batch)
  sent = float(f"{sent:.6g}")  # as documents have it
  assert (times, sent) == (pytest.approx(count), pytest.approx(size))
  alone = Deployment(shapes.of_config(target), COUNTING)
  assert round_cost(alone, cost, k, batch, 100).sent == 0
