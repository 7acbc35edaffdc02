"""What a learned drafter reads and needs, against its own arrays."""

import jax
import pytest

from learned_kinds import KINDS, TARGET, draft_head
from specdec.checkpoints import learned as saved
from specdec.drafters.heads import cost as head_cost
from specdec.drafters.heads.head_config import HeadConfig

SHAPE = dict(width=8, mlp_width=12, num_heads=2, head_dim=4)


def test_weights_that_a_draft_token_reads():
  target = TARGET
  head_config = HeadConfig("medusa", num_layers=0, levels=3, **SHAPE)
  draft_head = saved.Learned(head_config, None, None, "").draft_head(target)
  width, tokens = head_config.width, target.vocab_size
  # One head's block, the norm before the vocabulary, and the vocabulary.
  expected = width**2 + width + tokens * width
  assert head_cost.step_weights(draft_head, target) == expected
  shared = HeadConfig("eagle", head="shared", **SHAPE)
  draft_head = saved.Learned(shared, None, None, "").draft_head(target)
  net = jax.eval_shape(draft_head.init, jax.random.key(0))
  every = head_cost.num_weights(net) + target.vocab_size * target.width
  assert head_cost.step_weights(draft_head, target) == every


@pytest.mark.parametrize("kind", KINDS)
def test_what_serving_needs(kind):
  batch, length = 2, 5
  made = draft_head(kind)
  layers = made.init_cache(batch, length).layers if made.has_kv_cache else ()
  own = sum(x.nbytes for x in jax.tree.leaves(layers))
  streams = 1 + len(made.features)  # the hidden state, and these
  read = 4 * batch * length * streams * TARGET.width
  cost = head_cost.drafter_cost(made, TARGET)
  per_position = cost.position_bytes + cost.hidden_bytes
  assert batch * length * per_position == own + read
