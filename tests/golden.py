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
V, NEW = learned_kinds.V, 20


class Way(NamedTuple):
  """What decodes the entries of one program."""

  target: str
  drafter: Callable
  rule: Callable
  batch: int = 3


def on_table(drafter, rule, batch=3):
  return Way("table", lambda: drafter(table_model.model(V)), rule, batch)


def tree_of(shape):
  return lambda model: drafters.model(model, shape=shape)


def chain(k=4):
  return tree_of(draft_shape.chain(k))


def lookup(k=4):
  return lambda _: drafters.lookup(k, ngram=2, min_ngram=1)


def learned(kind, shape, copies=0):
  def make():
    head, target = learned_kinds.draft_head(kind), learned_kinds.target()[0]
    drafter = serve.drafter(head, target, shape, max_external_drafts=copies)
    return (
      drafters.fallback(lookup(copies)(None), drafter) if copies else drafter
    )

  return make


def on_llama(make, *arguments, **options):
  return lambda: make(learned_kinds.target()[0], *arguments, **options)


def of_shipped(name, k=3):
  def make():
    if name == "model":
      return drafters.model(transformer.model(shipped_draft().config), k)
    config = shipped_target().config
    head, _ = shipped_head(name)
    return serve.drafter(head, transformer.model(config), draft_shape.chain(k))

  return make


CHAINS = draft_shape.static(draft_tree.parallel(2, 3, 1), "iid")
TREE = draft_shape.static([-1, 0, 0, 0, 1, 1, 2, 4])
LIKELIEST = draft_shape.static([-1, 0, 0, 0, 1, 1, 2, 4], "deterministic")
DYNAMIC = draft_shape.dynamic(3, 3, 7)
SOME = Skip((1,), (0, 2))
rejection, coupled = acceptance.rejection, acceptance.coupled

WAYS = {
  "baseline": Way(
    "table", lambda: decode.NO_DRAFTER, lambda: decode.NO_DRAFT_RULE
  ),
  "model, rejection": on_table(chain(), rejection),
  "model, rejection, one row": on_table(chain(), rejection, 1),
  "model, coupled": on_table(chain(), coupled),
  "model, block": on_table(chain(), acceptance.block),
  "model, naive": on_table(chain(), acceptance.naive),
  "model, kseq": on_table(chain(2), acceptance.kseq),
  "model, lenience": on_table(chain(), lambda: acceptance.lenience(0.5)),
  "model, typical": on_table(chain(), acceptance.typical),
  "model, relaxed": on_table(chain(), lambda: acceptance.relaxed(3, 0.1)),
  "model, synthetic": on_table(
    chain(), lambda: acceptance.synthetic((0.9, 0.5))
  ),
  "lookup, rejection": on_table(lookup(), rejection),
  "lookup, block": on_table(lookup(), acceptance.block),
  "lookup, coupled": on_table(lookup(), coupled),
  "chains, kseq": on_table(tree_of(CHAINS), acceptance.kseq),
  "chains, rejection": on_table(tree_of(CHAINS), rejection),
  "tree, rejection": on_table(tree_of(TREE), rejection),
  "tree, coupled": on_table(tree_of(TREE), coupled, 4),
  "tree, naive": on_table(tree_of(TREE), acceptance.naive),
  "tree, typical": on_table(tree_of(TREE), acceptance.typical),
  "likeliest, rejection": on_table(tree_of(LIKELIEST), rejection),
  "dynamic, rejection": on_table(tree_of(DYNAMIC), rejection),
  "dynamic, coupled": on_table(tree_of(DYNAMIC), coupled),
  "early exit": Way("llama", on_llama(drafters.early_exit, 2, 3), rejection),
  "early exit, tree": Way(
    "llama", on_llama(drafters.early_exit, 2, shape=TREE), rejection
  ),
  "layer skip": Way(
    "llama",
    on_llama(drafters.layer_skip, SOME, 3, drafters.Threshold(0.3)),
    coupled,
  ),
  "layer skip, tree": Way(
    "llama", on_llama(drafters.layer_skip, SOME, shape=TREE), rejection
  ),
  **{
    kind: Way(kind, learned(kind, draft_shape.chain(3)), rule)
    for kind, rule in zip(
      learned_kinds.KINDS, (rejection, acceptance.block, coupled) * 3
    )
  },
  "mtp, tree": Way("mtp", learned("mtp", TREE), rejection),
  "eagle3, dynamic": Way("eagle3", learned("eagle3", DYNAMIC), rejection),
  "copies, eagle": Way(
    "eagle", learned("eagle", draft_shape.chain(3), 5), rejection
  ),
  "shipped": Way("shipped", of_shipped("model"), rejection, 1),
  "shipped, block": Way("shipped", of_shipped("model", 4), acceptance.block, 2),
  "shipped, coupled": Way("shipped", of_shipped("model"), coupled, 2),
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
  if name == "llama":
    model, weights = learned_kinds.target()
    return model, Params(weights)
  if name in learned_kinds.KINDS:
    model, weights = learned_kinds.target()
    return model, Params(weights, learned_kinds.weights(name))
  target = shipped_target()
  model = transformer.model(target.config)
  if name == "shipped":
    return model, Params(target.params, shipped_draft().params)
  _, weights = shipped_head(name.split()[1])
  return model, Params(target.params, weights)


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
  drafter, rule = way.drafter(), way.rule()
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
