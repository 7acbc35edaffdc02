"""Statistics of the real loop: whole texts against their exact distribution.

Rows of four settings share one batch. Thresholds are fixed, and so are seeds:
an honest rule fails with probability 1e-4 a group, a planted bug must fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import distribution
from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
)
from specdec import noise as addresses
from specdec.noise import DRAFT, NEXT, Noise, pilot_key
from specdec.testing import table_model
from specdec.types import Draft, Drafter, DraftSpec, Params

V = 3
NEW = 4  # tokens a row
ROWS = 4096  # a group
TREE = np.array([-1, 0, 0, 1, 1, 2], np.int32)
SMALLEST_P = 1e-4
SLOW = pytest.mark.slow

# (prompt, temperature, top_k, top_p); V and 1.0 filter nothing.
GROUPS = [
  ((0,), 1.0, V, 1.0),
  ((1, 2), 1.0, 2, 1.0),
  ((2, 0, 1), 0.8, V, 0.8),
  ((1, 1), 0.0, V, 1.0),  # B9: greedy rows beside sampled ones
]

PARAMS = Params(
  table_model.init_params(jax.random.key(0), V, 1.2),
  table_model.init_params(jax.random.key(1), V, 1.2),
)


def whatever_the_past(distribution) -> dict:
  shape = (V + 1, V, V)
  return {
    "table": jnp.broadcast_to(
      jnp.log(jnp.array(distribution)[None, None]), shape
    )
  }


# A refusal says much about the noise of the two tokens that remain.
SKEWED = Params(
  whatever_the_past([0.02, 0.68, 0.3]), whatever_the_past([0.5, 0.49, 0.01])
)


def tree_drafter(kind: str, stops: bool = False) -> Drafter:
  """Children on a small static tree, drawn from the draft's table.

  stops: how many nodes are drafted depends on the pending token.
  """
  depth = distribution.depths(TREE)

  def propose(params, draft_state, context):
    rows = jnp.arange(context.tokens.shape[0])
    before = context.tokens[rows, jnp.maximum(context.length - 2, 0)]
    before = jnp.where(context.length > 1, before, V)
    tokens = [context.tokens[rows, context.length - 1]]
    drawn = [jnp.zeros((len(rows), V))]
    for node in range(1, len(TREE)):
      parent = TREE[node]
      above = tokens[TREE[parent]] if parent else before
      logits = params.draft["table"][above, tokens[parent]]
      ours = sampling.warp(logits, context.sampling)
      older = [n for n in range(1, node) if TREE[n] == parent]
      taken = jnp.zeros(ours.shape, bool)
      for n in older:
        taken |= jnp.arange(V)[None] == tokens[n][:, None]
      if kind == "deterministic":
        tokens.append(sampling.argmax(jnp.where(taken, -jnp.inf, logits)))
        continue
      if kind == "without_replacement":
        left = jnp.where(taken, -jnp.inf, ours)
        used_up = jnp.all(jnp.isinf(left), axis=-1, keepdims=True)
        left = jnp.where(used_up & ~taken, 0.0, left)
        ours = jax.nn.log_softmax(left)
        noise = context.noise(depth[node], older[0] if older else node)
      else:
        noise = context.noise(depth[node], node)
      tokens.append(sampling.argmax(ours + noise))
      drawn.append(ours)
    said = None if kind == "deterministic" else jnp.stack(drawn, axis=1)
    count = jnp.full_like(context.length, len(TREE))
    if stops:
      count = jnp.array([1, 4, 6])[tokens[0]]
    return Draft(jnp.stack(tokens, 1), None, said, count), draft_state

  size = len(TREE)
  widths = (1, 4, size) if stops else (size,)
  spec = DraftSpec.of(TREE, widths, siblings=kind)
  return Drafter(
    spec, lambda *_: None, propose, lambda _, draft_state, *rest: draft_state
  )


def grown(expansion: draft_shape.DraftShape) -> Drafter:
  """A tree of the draft's table, drawn by draft_shape.py."""
  return drafters.model(table_model.model(V), shape=expansion)


DRAFTERS = {
  "chains": lambda: grown(draft_shape.static(draft_tree.parallel(3, 2), "iid")),
  "shared": lambda: grown(
    draft_shape.static(draft_tree.parallel(2, 3, 1), "iid")
  ),
  "dynamic": lambda: grown(draft_shape.dynamic(2, 3, 5)),
  "model": lambda: drafters.model(table_model.model(V), 3),
  "lookup": lambda: drafters.lookup(3, ngram=2, min_ngram=1),
  "iid": lambda: tree_drafter("iid"),
  "without_replacement": lambda: tree_drafter("without_replacement"),
  "deterministic": lambda: tree_drafter("deterministic"),
  "stopping": lambda: tree_drafter("without_replacement", stops=True),
}


def exact(group, params=PARAMS) -> np.ndarray:
  """Joint distribution of the NEW tokens of a group, by the table."""
  prompt, *options = group
  logits = np.asarray(params.target["table"])
  levels = []
  for d in range(NEW):
    level = np.empty((V,) * (d + 1), np.float32)
    for text in np.ndindex(*(V,) * d):
      past = (V, *prompt, *text)
      level[text] = logits[past[-2], past[-1]]
    levels.append(level)
  return distribution.text_distribution(distribution.warp(levels, *options))


EXACT = [exact(group) for group in GROUPS]


def sample(drafter, rule, seed=2, groups=GROUPS, params=PARAMS, target=None):
  """[ROWS, NEW] emitted tokens of every group, from one call."""
  longest = max(len(group[0]) for group in groups)
  prompt = np.zeros((len(groups), longest), np.int32)
  for row, (text, *_) in zip(prompt, groups):
    row[: len(text)] = text
  length = np.array([len(group[0]) for group in groups])

  def spread(x):  # groups interleave
    return np.concatenate([np.asarray(x)] * ROWS)

  state = decode.generate(
    target or table_model.model(V),
    drafter,
    rule,
    params,
    spread(prompt),
    spread(length),
    jax.random.key(seed),
    max_length=longest + NEW,
    limit=jnp.asarray(spread(length + NEW)),
    sampling=sampling.settings(
      ROWS * len(groups), *(spread(x) for x in list(zip(*groups))[1:])
    ),
  )
  assert bool(jnp.all(state.length == spread(length + NEW)))
  tokens = np.asarray(state.tokens).reshape(ROWS, len(groups), -1)
  return [tokens[:, g, n : n + NEW] for g, n in enumerate(length)]


def p_value(texts: np.ndarray, joint: np.ndarray) -> float:
  """Chi-square of whole texts; cells that expect under 5 are one cell."""
  cells = np.ravel_multi_index(tuple(texts.T), joint.shape)
  seen = np.bincount(cells, minlength=joint.size)
  expected = joint.ravel() * len(texts)
  if np.any(seen[expected == 0]):
    return 0.0  # an impossible text
  rare = expected < 5
  seen = np.append(seen[~rare], seen[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  chi = np.sum((seen - expected) ** 2 / np.maximum(expected, 1e-9))
  return float(stats.chi2.sf(chi, max(len(expected) - 1, 1)))


@pytest.mark.parametrize(
  "name, rule",
  [
    ("model", acceptance.rejection),
    ("lookup", acceptance.rejection),
    ("model", acceptance.block),
    pytest.param("lookup", acceptance.block, marks=pytest.mark.slow),
    pytest.param("model", acceptance.naive, marks=pytest.mark.slow),
    pytest.param("without_replacement", acceptance.naive, marks=SLOW),
    pytest.param("iid", acceptance.rejection, marks=pytest.mark.slow),
    ("without_replacement", acceptance.rejection),
    ("deterministic", acceptance.rejection),
    ("chains", acceptance.kseq),
    ("dynamic", acceptance.rejection),
    pytest.param("chains", acceptance.rejection, marks=SLOW),
    pytest.param("chains", acceptance.naive, marks=SLOW),
    pytest.param("shared", acceptance.kseq, marks=SLOW),
    pytest.param("dynamic", acceptance.coupled, marks=SLOW),
    pytest.param("model", acceptance.coupled, marks=pytest.mark.slow),
    ("without_replacement", acceptance.coupled),
    pytest.param("stopping", acceptance.rejection, marks=pytest.mark.slow),
    pytest.param("stopping", acceptance.coupled, marks=pytest.mark.slow),
    pytest.param("lookup", acceptance.coupled, marks=pytest.mark.slow),
    pytest.param("iid", acceptance.coupled, marks=pytest.mark.slow),
    pytest.param("deterministic", acceptance.coupled, marks=pytest.mark.slow),
  ],
)
def test_texts_follow_the_targets_distribution(name, rule):
  texts = sample(DRAFTERS[name](), rule())
  p = [p_value(*pair) for pair in zip(texts, EXACT)]
  assert min(p) > SMALLEST_P, p
  assert p[-1] == 1.0  # greedy rows: one text, every time


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize(
  "name, rule",
  [
    ("model", acceptance.rejection),
    ("model", acceptance.block),
    ("without_replacement", acceptance.rejection),
    ("chains", acceptance.kseq),
    ("dynamic", acceptance.rejection),
  ],
)
def test_whatever_the_seed(name, rule, seed):
  texts = sample(DRAFTERS[name](), rule(), seed)
  assert min(p_value(*pair) for pair in zip(texts, EXACT)) > SMALLEST_P


@pytest.mark.slow  # the coupled rule gives these very texts
def test_autoregressive_decoding_follows_the_distribution():
  texts = sample(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, seed=3)
  assert min(p_value(*pair) for pair in zip(texts, EXACT)) > SMALLEST_P


@pytest.mark.parametrize("honest", [True, False])
def test_a_k_chosen_by_a_pilot_run_is_lossless_only_with_a_key_of_its_own(
  honest,
):
  """--k=auto, a row at a time: as many tokens as a first round accepted."""
  group, rows = ((0,), 1.0, V, 1.0), 5 * ROWS
  prompt = jnp.zeros((rows, 1), jnp.int32)
  key = jax.random.key(21)

  def decoded(key, k, **options):
    return decode.generate(
      table_model.model(V),
      drafters.model(table_model.model(V), k),
      acceptance.block(),
      SKEWED,
      prompt,
      jnp.ones((rows,), jnp.int32),
      key,
      max_length=1 + NEW,
      sampling=sampling.settings(rows, 1.0),
      **options,
    )

  pilot = decoded(pilot_key(key) if honest else key, 3)
  accepted = pilot.stats.accepted[:, 1]  # rounds that accepted two tokens
  short, long = (decoded(key, k).tokens[:, 1:] for k in (1, 3))
  texts = np.asarray(jnp.where(accepted[:, None] > 0, long, short))
  p = p_value(texts, exact(group, SKEWED))
  assert p > SMALLEST_P if honest else p < SMALLEST_P


def planted(name: str, params=PARAMS, rule=None) -> float:
  """p of unfiltered texts, some rounds long; prints what it saw."""
  group = ((0,), 1.0)
  rule = rule or acceptance.rejection()
  [texts] = sample(DRAFTERS[name](), rule, 2, [group], params)
  p = p_value(texts, exact(group, params))
  print(f"{name}: p = {p:.2g}")
  return p


def test_b07_draft_noise_reused_for_the_next_token_is_caught(monkeypatch):
  def next_noise(self, node):  # the very noise the refused node was drawn by
    return self._gumbel(DRAFT, self.length, node + 1)

  monkeypatch.setattr(Noise, "next", next_noise)
  assert planted("model", SKEWED) < SMALLEST_P


@pytest.mark.slow
def test_honest_noise_passes_where_reused_noise_is_caught():
  assert planted("model", SKEWED) > SMALLEST_P


@pytest.mark.slow
def test_b07_streams_that_collide_are_caught(monkeypatch):
  # node n's own noise decides what follows node n
  monkeypatch.setattr(addresses, "NEXT", DRAFT)
  assert planted("model") < SMALLEST_P


def test_one_uniform_for_all_siblings_is_caught(monkeypatch):
  honest = Noise.accept

  def accept(self, num_nodes):
    first = honest(self, 1)
    return jnp.broadcast_to(first, (first.shape[0], num_nodes))

  monkeypatch.setattr(Noise, "accept", accept)
  assert planted("without_replacement") < SMALLEST_P


@pytest.mark.slow
def test_noise_that_forgets_the_round_is_caught(monkeypatch):
  def next_noise(self, node):
    return self._gumbel(NEXT, 0 * self.length, node)

  monkeypatch.setattr(Noise, "next", next_noise)
  assert planted("lookup") < SMALLEST_P


@pytest.mark.slow  # enumerated in acceptance_law_test
def test_b02_raw_distribution_said_for_a_filtered_draw_is_caught():
  honest = DRAFTERS["model"]()

  def propose(params, draft_state, context):
    draft, draft_state = honest.propose(params, draft_state, context)
    said = jnp.maximum(draft.log_probs, jnp.log(0.1))  # tails cut off, unsaid
    return draft._replace(log_probs=jax.nn.log_softmax(said)), draft_state

  liar = honest._replace(propose=propose)
  texts = sample(liar, acceptance.rejection(), 2, GROUPS[1:2])
  assert p_value(texts[0], EXACT[1]) < SMALLEST_P
