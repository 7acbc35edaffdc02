"""Statistics of the real loop: whole texts against their exact distribution.

Rows of four settings share one batch. Thresholds are fixed, and so are seeds:
an honest rule fails with probability 1e-4 a group, a planted bug must fail.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import distribution
from specdec import acceptance, decode, sampling
from specdec.testing import table_model
from specdec.types import Params

V = 3
NEW = 4  # tokens a row
ROWS = 4096  # a group
SMALLEST_P = 1e-4

# (prompt, temperature, top_k, top_p); V and 1.0 filter nothing.
GROUPS = [
  ((0,), 1.0, V, 1.0),
  ((1, 2), 1.0, 2, 1.0),
  ((2, 0, 1), 0.8, V, 0.8),
  ((1, 1), 0.0, V, 1.0),  # greedy rows in a batch with sampled ones (b09)
]

MODEL = table_model.model(V)
PARAMS = Params(
  table_model.init_params(jax.random.key(0), V, 1.2),
  table_model.init_params(jax.random.key(1), V, 1.2),
)


def by_last_token(*rows) -> dict:
  """A table of what follows each token; one row: whatever the past is."""
  logits = jnp.log(jnp.array(rows))[None]
  return {"table": jnp.broadcast_to(logits, (V + 1, V, V))}


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
    target or MODEL,
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
  """Chi-square of whole texts; those expected under 5 times count as one."""
  numbers = np.ravel_multi_index(tuple(texts.T), joint.shape)
  observed = np.bincount(numbers, minlength=joint.size)
  expected = joint.ravel() * len(texts)
  if np.any(observed[expected == 0]):
    return 0.0  # an impossible text
  rare = expected < 5
  observed = np.append(observed[~rare], observed[rare].sum())
  expected = np.append(expected[~rare], expected[rare].sum())
  chi = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
  return float(stats.chi2.sf(chi, max(len(expected) - 1, 1)))


def check(texts) -> None:
  """Asserts that the texts of all GROUPS have their distribution."""
  p = [p_value(*pair) for pair in zip(texts, EXACT)]
  assert min(p) > SMALLEST_P, p
  assert p[-1] == 1.0  # greedy rows: one text, every time


def unfiltered(drafter, params=PARAMS, rule=None) -> float:
  """p of unfiltered texts, some rounds long."""
  group = ((0,), 1.0)
  rule = rule or acceptance.rejection()
  [texts] = sample(drafter, rule, 2, [group], params)
  return p_value(texts, exact(group, params))
