"""Statistics of the real loop: whole texts against their exact law.

Rows of four settings share one batch. Thresholds are fixed, and so are seeds:
an honest rule fails with probability 1e-4 a group, a planted bug must fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import law
from specdec import acceptance, decode, drafters, sampling
from specdec.models import table
from specdec.types import Draft, Drafter, DraftSpec, Params

V = 3
NEW = 4  # tokens a row
ROWS = 3072  # a group
TREE = np.array([-1, 0, 0, 1, 1, 2], np.int32)
SMALLEST_P = 1e-4

# (prompt, temperature, top_k, top_p); V and 1.0 filter nothing.
GROUPS = [
  ((0,), 1.0, V, 1.0),
  ((1, 2), 1.0, 2, 1.0),
  ((2, 0, 1), 0.8, V, 0.8),
  ((1, 1), 0.0, V, 1.0),  # B9: greedy rows beside sampled ones
]

PARAMS = Params(
  table.init_params(jax.random.key(0), V, 1.2),
  table.init_params(jax.random.key(1), V, 1.2),
)


def tree_drafter(kind: str) -> Drafter:
  """Children on a small static tree, drawn from the draft's table."""
  depth = law.depths(TREE)

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
      if kind == "point_mass":
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
    said = None if kind == "point_mass" else jnp.stack(drawn, axis=1)
    count = jnp.full_like(context.length, len(TREE))
    return Draft(jnp.stack(tokens, 1), TREE, said, count), draft_state

  size = len(TREE)
  spec = DraftSpec(size, 2, (size,), chain=False, siblings=kind)
  return Drafter(
    spec, lambda *_: None, propose, lambda _, draft_state, *rest: draft_state
  )


DRAFTERS = {
  "model": lambda: drafters.model(table.model(V), 3),
  "lookup": lambda: drafters.lookup(3, ngram=2, min_ngram=1),
  "iid": lambda: tree_drafter("iid"),
  "without_replacement": lambda: tree_drafter("without_replacement"),
  "point_mass": lambda: tree_drafter("point_mass"),
}


def exact(prompt, temperature, top_k, top_p) -> np.ndarray:
  """Joint law of the NEW tokens after a prompt, from the target's table."""
  logits = np.asarray(PARAMS.target["table"])
  levels = []
  for d in range(NEW):
    level = np.empty((V,) * (d + 1), np.float32)
    for text in np.ndindex(*(V,) * d):
      past = (V, *prompt, *text)
      level[text] = logits[past[-2], past[-1]]
    levels.append(level)
  return law.text_law(law.warp(levels, temperature, top_k, top_p))


EXACT = [exact(*group) for group in GROUPS]


def sample(drafter, rule, seed: int) -> list[np.ndarray]:
  """[ROWS, NEW] emitted tokens of every group, from one call."""
  longest = max(len(group[0]) for group in GROUPS)
  prompt = np.zeros((len(GROUPS), longest), np.int32)
  for row, (text, *_) in zip(prompt, GROUPS):
    row[: len(text)] = text
  length = np.array([len(group[0]) for group in GROUPS])

  def spread(x):  # groups interleave
    return np.concatenate([np.asarray(x)] * ROWS)

  state = decode.generate(
    table.model(V),
    drafter,
    rule,
    PARAMS,
    spread(prompt),
    spread(length),
    jax.random.key(seed),
    max_length=longest + NEW,
    limit=jnp.asarray(spread(length + NEW)),
    sampling=sampling.settings(
      ROWS * len(GROUPS), *(spread(x) for x in list(zip(*GROUPS))[1:])
    ),
  )
  assert bool(jnp.all(state.length == spread(length + NEW)))
  tokens = np.asarray(state.tokens).reshape(ROWS, len(GROUPS), -1)
  return [
    tokens[:, g, length[g] : length[g] + NEW] for g in range(len(GROUPS))
  ]


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


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_follow_the_targets_law(name, rule):
  texts = sample(DRAFTERS[name](), getattr(acceptance, rule)(), seed=2)
  p = [p_value(*pair) for pair in zip(texts, EXACT)]
  assert min(p) > SMALLEST_P, p
  assert p[-1] == 1.0  # greedy rows: one text, every time


def test_plain_decoding_follows_the_law():
  texts = sample(decode.PLAIN_DRAFTER, decode.PLAIN_RULE, seed=3)
  assert min(p_value(*pair) for pair in zip(texts, EXACT)) > SMALLEST_P


def planted(name: str, rule=None) -> float:
  """p of the unfiltered group; prints what it saw."""
  rule = rule or acceptance.rejection()
  texts = sample(DRAFTERS[name](), rule, seed=2)
  p = p_value(texts[0], EXACT[0])
  print(f"{name}: p = {p:.2g}")
  return p


@pytest.mark.parametrize("name", ["model", "iid"])
def test_b07_draft_noise_reused_for_the_next_token_is_caught(
  monkeypatch, name
):
  def next_noise(self, node):  # the very noise the refused child was drawn by
    child = node + 1 if name == "model" else 2 * node + 1
    return self._gumbel(sampling.DRAFT, self.length, child)

  monkeypatch.setattr(sampling.Noise, "next", next_noise)
  assert planted(name) < SMALLEST_P


def test_b07_streams_that_collide_are_caught(monkeypatch):
  # node n's own noise decides what follows node n
  monkeypatch.setattr(sampling, "NEXT", sampling.DRAFT)
  assert planted("model") < SMALLEST_P


def test_b07_one_uniform_for_all_nodes_is_caught(monkeypatch):
  honest = sampling.Noise.accept

  def accept(self, num_nodes):
    first = honest(self, 1)
    return jnp.broadcast_to(first, (first.shape[0], num_nodes))

  monkeypatch.setattr(sampling.Noise, "accept", accept)
  assert planted("without_replacement") < SMALLEST_P


def test_noise_that_forgets_the_round_is_caught(monkeypatch):
  def next_noise(self, node):
    return self._gumbel(sampling.NEXT, 0 * self.length, node)

  monkeypatch.setattr(sampling.Noise, "next", next_noise)
  assert planted("lookup") < SMALLEST_P


def test_b02_raw_law_said_for_a_filtered_draw_is_caught():
  honest = DRAFTERS["model"]()

  def propose(params, draft_state, context):
    draft, draft_state = honest.propose(params, draft_state, context)
    said = jnp.maximum(draft.log_probs, jnp.log(0.1))  # tails cut off, unsaid
    return draft._replace(log_probs=jax.nn.log_softmax(said)), draft_state

  texts = sample(
    honest._replace(propose=propose), acceptance.rejection(), seed=2
  )
  p = [p_value(*pair) for pair in zip(texts, EXACT)]
  assert p[1] < SMALLEST_P, p
