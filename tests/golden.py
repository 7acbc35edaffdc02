"""Texts that no refactor may change: what is decoded for the golden file.

An entry is a target, a drafter, a rule, a temperature and a seed; its tokens,
origins and counts stand in fixtures/golden/texts.json. They were written on
version 0.1.0 and are the same on jax 0.10.2 and 0.12.0.1, with and without the
compiler flags of the tests: logits that differ in their last bits decide no
token of them.

  python tests/golden.py            # compares; says what differs
  python tests/golden.py --write    # after a change of behaviour that is meant
"""

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import golden_costs
import learned_kinds
from specdec import (
  acceptance,
  checkpoints,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec.checkpoints import learned as saved
from specdec.checkpoints import shipped
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models import transformer
from specdec.testing import table_model
from specdec.types import Params, Skip

FILE = pathlib.Path(__file__).parent / "fixtures" / "golden" / "texts.json"
TEMPERATURES, SEEDS = (0.0, 1.0), (0, 1)
# The published layouts are younger than the golden texts.
OF_0_1_0 = [x for x in learned_kinds.KINDS if not x.startswith("published")]
V, NEW = learned_kinds.V, 20


class Way(NamedTuple):
  """What decodes the entries of one program."""

  target: str
  drafter: Callable
  rule: Callable
  batch: int = 3


def of(make, *arguments, **options):
  """Returns what makes this drafter of a target."""
  return lambda target: make(target, *arguments, **options)


def lookup(k=4):
  return drafters.lookup(k, ngram=2, min_ngram=1)


def learned(kind, shape, copies=0):
  def make(target):
    head = learned_kinds.draft_head(kind)
    drafter = serve.drafter(head, target, shape, max_external_drafts=copies)
    if not copies:
      return drafter
    return drafters.fallback(lookup(copies), drafter)

  return make


def shipped_model(k=3):
  return lambda _: drafters.model(transformer.model(shipped_draft().config), k)


def of_shipped(name):
  return lambda target: serve.drafter(
    shipped_head(name)[0], target, draft_shape.chain(3)
  )


CHAIN, SHORT, THREE = map(draft_shape.chain, (4, 2, 3))
CHAINS = draft_shape.static(draft_tree.parallel(2, 3, 1), "iid")
TREE = draft_shape.static([-1, 0, 0, 0, 1, 1, 2, 4])
LIKELIEST = draft_shape.static([-1, 0, 0, 0, 1, 1, 2, 4], "deterministic")
DYNAMIC = draft_shape.dynamic(3, 3, 7)
MODEL = of(drafters.model, shape=CHAIN)
SOME = Skip((1,), (0, 2))
rejection, coupled, block = (
  acceptance.rejection, acceptance.coupled, acceptance.block,
)  # fmt: skip
# Rules whose arguments are not their defaults, as calls.
RULES = {
  "lenience": lambda: acceptance.lenience(0.5),
  "relaxed": lambda: acceptance.relaxed(3, 0.1),
  "synthetic": lambda: acceptance.synthetic((0.9, 0.5)),
}
ON_TABLE = (
  ("model", MODEL, "rejection coupled block naive lenience typical"),
  ("model", MODEL, "relaxed synthetic"),
  ("model", of(drafters.model, shape=SHORT), "kseq"),
  ("lookup", lambda _: lookup(), "rejection block coupled"),
  ("chains", of(drafters.model, shape=CHAINS), "kseq rejection"),
  ("tree", of(drafters.model, shape=TREE), "rejection naive typical"),
  ("likeliest", of(drafters.model, shape=LIKELIEST), "rejection"),
  ("dynamic", of(drafters.model, shape=DYNAMIC), "rejection coupled"),
)
WAYS = {
  "baseline": Way(
    "table", lambda _: decode.NO_DRAFTER, lambda: decode.NO_DRAFT_RULE
  ),
  **{
    f"{name}, {rule}": Way(
      "table", drafter, RULES.get(rule) or getattr(acceptance, rule)
    )
    for name, drafter, rules in ON_TABLE
    for rule in rules.split()
  },
  "model, rejection, one row": Way("table", MODEL, rejection, 1),
  "tree, coupled": Way("table", of(drafters.model, shape=TREE), coupled, 4),
  "early exit": Way("llama", of(drafters.early_exit, 2, 3), rejection),
  "early exit, tree": Way(
    "llama", of(drafters.early_exit, 2, shape=TREE), rejection
  ),
  "layer skip": Way(
    "llama", of(drafters.layer_skip, SOME, 3, drafters.Threshold(0.3)), coupled
  ),
  "layer skip, tree": Way(
    "llama", of(drafters.layer_skip, SOME, shape=TREE), rejection
  ),
  **{
    kind: Way(kind, learned(kind, THREE), rule)
    for kind, rule in zip(OF_0_1_0, (rejection, block, coupled) * 3)
  },
  "mtp, tree": Way("mtp", learned("mtp", TREE), rejection),
  "eagle3, dynamic": Way("eagle3", learned("eagle3", DYNAMIC), rejection),
  "copies, eagle": Way("eagle", learned("eagle", THREE, 5), rejection),
  "shipped": Way("shipped", shipped_model(), rejection, 1),
  "shipped, block": Way("shipped", shipped_model(4), block, 2),
  "shipped, coupled": Way("shipped", shipped_model(), coupled, 2),
  "shipped, mtp": Way("shipped mtp", of_shipped("mtp"), rejection, 1),
  "shipped, recycle": Way("shipped recycle", of_shipped("recycle"), coupled, 1),
}


@functools.cache
def shipped_target():
  return checkpoints.load(shipped.FOLDER / shipped.TARGET)


@functools.cache
def shipped_draft():
  return checkpoints.load(shipped.FOLDER / shipped.DRAFT)


@functools.cache
def shipped_head(name):
  """A shipped head, and its weights."""
  target = shipped_target()
  learned = saved.load(shipped.drafter(name), target)
  head = learned.draft_head(target.config)
  return head, draft_heads.weights_of(head, learned.net, target.params)


@functools.cache
def models(name):
  """The target, and the weights of target and draft."""
  if name == "table":
    target = table_model.init_params(jax.random.key(0), V, 1.5)
    other = table_model.init_params(jax.random.key(1), V, 0.7)
    draft = jax.tree.map(lambda t, o: t + 0.5 * o, target, other)
    return table_model.model(V), Params(target, draft)
  if not name.startswith("shipped"):
    model, weights = learned_kinds.target()
    draft = None if name == "llama" else learned_kinds.weights(name)
    return model, Params(weights, draft)
  target = shipped_target()
  kind = name.removeprefix("shipped").strip()
  draft = shipped_head(kind)[1] if kind else shipped_draft().params
  return transformer.model(target.config), Params(target.params, draft)


def prompts(way: Way, vocab_size: int):
  """Prompts [B, P] of unlike lengths with something to look up in them."""
  if way.target.startswith("shipped"):
    ids = shipped_target().tokenizer.encode(shipped.PROMPT.read_text())[:40]
    rows = np.tile(np.asarray(ids), (way.batch, 1))
  else:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, vocab_size, size=(way.batch, 9))
    rows[:, 5:] = rows[:, :4]
  length = rows.shape[1] - 2 * np.arange(way.batch)
  return jnp.asarray(rows), jnp.asarray(length)


def decoded(name: str) -> dict[str, dict]:
  """The entries of one way, by 'way; temperature; seed'."""
  way = WAYS[name]
  model, params = models(way.target)
  rows, length = prompts(way, model.vocab_size)
  drafter, rule = way.drafter(model), way.rule()
  entries = {}
  for temperature in TEMPERATURES:
    for seed in SEEDS if temperature else SEEDS[:1]:
      state = decode.generate(
        model,
        drafter,
        rule,
        params,
        rows,
        length,
        jax.random.key(seed),
        max_length=rows.shape[1] + NEW,
        sampling=sampling.settings(way.batch, temperature, None, 0.95),
        limit=length + NEW,
        eos_ids=(1,),
      )
      places = [slice(n, m) for n, m in zip(length, np.asarray(state.length))]
      stats = state.stats
      entries[f"{name}; T = {temperature:g}; seed {seed}"] = {
        "tokens": [t[p].tolist() for t, p in zip(state.tokens, places)],
        "origins": [o[p].tolist() for o, p in zip(state.origin, places)],
        "rounds": stats.rounds.tolist(),
        "nodes": stats.nodes.tolist(),
        "accepted": stats.accepted.tolist(),
      }
  return entries


if __name__ == "__main__":
  golden_costs.compare(
    FILE, {key: entry for way in WAYS for key, entry in decoded(way).items()}
  )
