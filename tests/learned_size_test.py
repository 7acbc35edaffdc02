"""What a learned drafter reads and needs, against its own arrays."""

import jax
import pytest

from learned_kinds import KINDS, TARGET, cell, recipe
from specdec.checkpoints import learned as saved
from specdec.learned import size
from specdec.learned.recipe import Recipe

SHAPE = dict(width=8, mlp_width=12, num_heads=2, head_dim=4)


def test_weights_that_a_guess_reads():
  target = TARGET
  recipe = Recipe("medusa", num_layers=0, levels=3, **SHAPE)
  cell = saved.Learned(recipe, None, None, "").cell(target)
  width, tokens = recipe.width, target.vocab_size
  # One head's block, the norm before the vocabulary, and the vocabulary.
  assert size.step_weights(cell, target) == width**2 + width + tokens * width
  shared = Recipe("eagle", head="shared", **SHAPE)
  cell = saved.Learned(shared, None, None, "").cell(target)
  net = jax.eval_shape(cell.init, jax.random.key(0))
  every = size.num_weights(net) + target.vocab_size * target.width
  assert size.step_weights(cell, target) == every


@pytest.mark.parametrize("kind", KINDS)
def test_what_serving_needs(kind):
  batch, length = 2, 5
  made = cell(kind)
  layers = made.init_cache(batch, length).layers if made.remembers else ()
  own = sum(x.nbytes for x in jax.tree.leaves(layers))
  streams = 1 + len(made.features)  # the hidden state, and these
  read = 4 * batch * length * streams * TARGET.width
  found = size.serving_bytes(recipe(kind), TARGET, batch, length)
  assert found == own + read
