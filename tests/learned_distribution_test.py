"""Whole texts with learned drafters against the target's exact distribution.

The target is the table of decode_law_test.py, whose chi-square this is; hidden
states are its logits, and a random embedding is lent.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learned_kinds import head_config, sharpened
from specdec import acceptance, draft_shape, draft_tree, drafters
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models.config import TransformerConfig
from specdec.testing import table_model
from specdec.types import Params
from text_statistics import (
  EXACT,
  GROUPS,
  PARAMS,
  SMALLEST_P,
  V,
  p_value,
  sample,
)

SLOW = pytest.mark.slow
TARGET = TransformerConfig(
  vocab_size=V,
  num_layers=1,
  width=V,  # the table's hidden states
  mlp_width=4,
  num_heads=1,
  num_kv_heads=1,
  head_dim=4,
)
TWO = np.array([0, 2])
SHAPES = {
  "chain": lambda: draft_shape.chain(3),
  # More siblings than tokens that it can draft: the last is any other
  # token.
  "tree": lambda: draft_shape.static(
    draft_tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
  ),
  "iid": lambda: draft_shape.static(draft_tree.parallel(2, 2), "iid"),
  "dynamic": lambda: draft_shape.dynamic(2, 2, 4),
}


@functools.cache
def drafter_of(kind, ids, shape):
  """(drafter, Params)."""
  made = head_config(kind, len(ids))
  draft_head = drafters.LEARNED[made.kind](
    made, TARGET, np.array(ids) if ids else None
  )
  embed = jax.random.normal(jax.random.key(3), (V, V))
  target = PARAMS.target | {"embed": {"weight": embed}}
  net = sharpened(draft_head.init(jax.random.key(4)), 3)
  draft = draft_heads.weights_of(draft_head, net, target)
  drafter = serve.drafter(draft_head, table_model.model(V), SHAPES[shape]())
  return drafter, Params(target, draft)


@pytest.mark.parametrize(
  "kind, ids, shape",
  [
    ("eagle", (), "chain"),
    ("mtp", (0, 2), "tree"),
    pytest.param("hydra", (0, 2), "chain", marks=SLOW),
    pytest.param("prophet", (), "tree", marks=SLOW),
    pytest.param("medusa", (1, 2), "tree", marks=SLOW),
    pytest.param("prophet", (0, 1), "iid", marks=SLOW),
    pytest.param("eagle", (0, 2), "dynamic", marks=SLOW),
    pytest.param("hydra", (2,), "tree", marks=SLOW),
  ],
)
def test_texts_follow_the_targets_distribution(kind, ids, shape):
  drafter, params = drafter_of(kind, ids, shape)
  found = sample(drafter, acceptance.rejection(), params=params)
  p = [p_value(*pair) for pair in zip(found, EXACT)]
  assert min(p) > SMALLEST_P, p
  assert p[-1] == 1.0  # greedy rows: one text, every time


def test_a_distribution_over_all_tokens_that_was_drawn_from_few_is_caught():
  """What the reduced vocabulary leaves out must be said to be impossible."""
  honest, params = drafter_of("mtp", (0, 2), "chain")

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    said = jnp.maximum(draft.log_probs, jnp.log(0.1))
    return draft._replace(log_probs=jax.nn.log_softmax(said)), state

  liar = honest._replace(propose=propose)
  [texts] = sample(
    liar, acceptance.rejection(), groups=GROUPS[:1], params=params
  )
  assert p_value(texts, EXACT[0]) < SMALLEST_P
