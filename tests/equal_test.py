"""Drafters at equal weights: the configs, and the tables of their results."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import programs
from specdec import drafters
from specdec.benchmark.measurements import MEASUREMENTS
from specdec.checkpoints import shipped
from specdec.drafters.heads import draft_head
from specdec.models import params as model_params
from specdec.models.config import TransformerConfig
from specdec.report import equal_tables
from specdec.training.setup import from_config

CONFIG = runpy.run_path(
  str(programs.SCRIPTS.parent / "configs" / "train" / "equal.py")
)
UNEQUAL = {"narrow", "wide", "shallow", "deep"}  # on purpose
TARGET = TransformerConfig(
  vocab_size=4096,
  num_layers=8,
  width=384,
  mlp_width=8,
  num_heads=6,
  num_kv_heads=2,
  head_dim=64,
)


def setup_of(kind: str):
  return from_config(CONFIG["get_config"](kind).to_dict())


def head_of(head_config):
  ids = np.arange(head_config.vocabulary) if head_config.vocabulary else None
  return drafters.LEARNED[head_config.kind](head_config, TARGET, ids, None)


def weights(kind: str) -> int:
  """What a drafter holds beyond the target's."""
  setup = setup_of(kind)
  if kind in ("draft", "pard"):
    specs = model_params.specs(setup.model).values()
    return sum(int(np.prod(spec.shape)) for spec in specs)
  head = head_of(setup.head_config)
  table = jax.ShapeDtypeStruct((4096, 384), jnp.float32)

  def held(key, table):
    params = {"head": {"weight": table}}
    return draft_head.weights_of(head, head.init(key), params)

  tree = jax.eval_shape(held, jax.random.key(0), table)
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
  "kind", [x for x in CONFIG["KINDS"] if x not in UNEQUAL]
)
def test_as_many_weights_as_the_draft_model(kind):
  assert weights(kind) == pytest.approx(weights("draft"), rel=0.1)


def test_drafts_of_one_pass_are_trained_as_long_as_they_are_compared():
  [line] = (x.line for x in MEASUREMENTS if x.name == "equal")
  [compared] = (x for x in line.split() if x.startswith("--k="))
  longest = max(map(int, compared.removeprefix("--k=").split(",")))
  assert setup_of("pard").masks.levels == longest
  assert setup_of("peagle").head_config.levels == longest
  slots = {}
  for kind in set(CONFIG["KINDS"]) - {"draft", "pard"}:
    head_config = setup_of(kind).head_config
    if head_config.block and kind != "short":
      assert head_config.levels == longest
      slots[kind] = head_of(head_config).num_slots(3)
  assert slots.pop("jetspec") == 4  # it is causal: cut to k + 1
  predict_next = {"next", "dspark", "gated", "rnn", "domino"}
  assert {kind for kind, count in slots.items() if count == 15} == predict_next
  assert {*slots.values()} == {15, 16}


def test_blocks_are_not_held_back():
  """As many keys as queries, a quarter of the positions, the paper's gamma."""
  for kind in CONFIG["KINDS"]:
    setup = setup_of(kind)
    if kind in ("draft", "pard") or not setup.head_config.block:
      continue
    assert setup.head_config.num_kv_heads == setup.head_config.num_heads
    assert setup.loss.block.anchors >= setup.options.sequence / 4
    gamma = 4 if setup.head_config.levels == 7 else 7
    assert setup.loss.decay == pytest.approx(np.exp(-1 / gamma), abs=1e-4)


def test_equal_tokens_and_steps():
  setups = [setup_of(x) for x in CONFIG["KINDS"]]
  seen = {
    (x.options.steps, x.options.batch, x.options.sequence) for x in setups
  }
  assert len(seen) == 1
  assert len({(x.data, x.target, x.options.seed) for x in setups}) == 1
  assert str(shipped.TARGET) == setups[0].target


def run(kind, seed, k, speedup, rates=(0.8, 0.7, 0.6)):
  return {
    "k": k,
    "drafter": {
      "name": f"head(runs/equal/{kind}-{seed}/best.safetensors)",
      "temperature": 0.0,
      "shape": "chain",
    },
    "acceptance": {
      "tokens_per_pass": {"value": 2.0 + seed},
      "conditional": [{"value": rate} for rate in rates],
    },
    "speed": {"speedup": {"value": speedup}},
  }


def test_means_over_seeds():
  runs = [run("dflash", seed, 3, 1.0 + 0.3 * seed) for seed in range(3)]
  runs.append(run("rnn", 0, 5, 1.5))
  table = equal_tables.equal({"x": {"runs": runs}}, "x")
  tokens, speed = table.split("greedy; speedup")
  # 2, 3, 4: a deviation of 1, over the root of 3.
  assert "| dflash | 3 | 3.00 ± 0.58 (n = 3) |  |" in tokens
  assert "| dflash | 3 | 1.30 ± 0.17 (n = 3) |  |" in speed
  assert "| rnn | 1 |  | 1.50 |" in speed


def priced(*runs):
  return equal_tables.equal_priced({"x": {"runs": runs}}, "x")


def test_better_acceptance_is_worth_more_at_8b():
  def prices(rates):
    table = priced(run("dspark", 0, 3, 1.0, rates))
    line = table.splitlines()[-1]
    return [float(x.split(",")[0]) for x in line.split(" | ")[3::3]]

  poor, good = prices((0.3, 0.2, 0.1)), prices((0.95, 0.95, 0.95))
  assert len(poor) == len(equal_tables.CHIPS)
  assert all(1.0 <= a < b for a, b in zip(poor, good))
  assert priced(run("rnn", 0, 3, 1.0)).count("\n") == 1


def test_the_acceptance_that_would_draw_level():
  other = run("eagle3", 0, 3, 1.0, (0.9, 0.9, 0.9))
  table = priced(run("dspark", 0, 3, 1.0, (0.5,) * 3), other)
  cells = [line.strip(" |").split(" | ") for line in table.splitlines()[2:]]
  for chip in range(len(equal_tables.CHIPS)):
    (speed, tokens, level), (best, _, same) = (
      row[3 + 3 * chip : 6 + 3 * chip] for row in cells
    )
    speed, best = (float(x.split(",")[0]) for x in (speed, best))
    assert float(level) > float(tokens)
    np.testing.assert_allclose(
      float(level) / float(tokens), best / speed, rtol=0.02
    )
    assert same == cells[1][4 + 3 * chip]  # itself
