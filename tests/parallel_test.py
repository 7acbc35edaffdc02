"""Parallel drafters: P-EAGLE, from random weights.

That serving is right is that a round drafts by what training computes for the
slots of the same root (trap B21), and that the conformance kit finds nothing.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import block_plants
import learned_kinds
from learned_kinds import (
  BATCH,
  PARALLEL,
  TARGET,
  K,
  L,
  V,
  draft_head,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  target,
  weights,
)
from planted import broken
from specdec import draft_shape, draft_tree, drafters, step
from specdec.drafters import mask_slots
from specdec.drafters.heads import cost as head_cost
from specdec.drafters.heads import serve
from specdec.drafters.heads.unroll import unroll_slots
from specdec.models import attention
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost
from specdec.testing import check_drafter
from specdec.types import Params
from two_forms import (
  CHAIN,
  EXACT,
  REJECTION,
  TREE,
  check_apart,
  check_equal,
  check_of_a_transformer,
  drafter_of,
  forms_apart,
  slow,
)

CHAINS = draft_shape.static(draft_tree.parallel(2, 2), "iid")
TINY = Deployment(shapes.of_config(TARGET), chips.get("v5e"))
SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", PARALLEL)
def test_b21_a_chain_is_drafted_by_the_distributions_it_is_trained_on(kind):
  check_equal(forms_apart(kind, drafter_of(kind)))


def test_b21_so_is_a_tree_in_the_middle_of_a_text():
  """A node's children are drawn from its level's distribution."""
  kind, shape = "peagle", TREE
  drafter, draft = drafter_of(kind, shape), weights(kind)
  state = speculate(drafter, REJECTION, draft, np.ones(BATCH), most=4)

  @jax.jit
  def propose(draft, state):
    params = Params(target()[1], draft)
    context = step.context_of(state, V, REJECTION)
    return drafter.propose(params, state.draft_state, context)[0]

  drafted = propose(draft, state)
  # Tokens after the root are masks to it, whatever they are.
  lines = np.zeros((BATCH, L + K), np.int32)
  for row, length in enumerate(np.asarray(state.length)):
    lines[row, :length] = state.tokens[row, :length]
  taught = np.asarray(learned_kinds.teacher(kind)(lines, draft))
  parents = np.array(shape.spec.parents)
  depth = draft_tree.depth(parents)
  for row, length in enumerate(np.asarray(state.length)):
    for node in range(1, len(parents)):
      if list(parents).index(parents[node]) != node:  # not the first child
        continue
      level = depth[node] - 1
      expected = taught[level, row, length - 1 + level]
      np.testing.assert_allclose(
        drafted.log_probs[row, node], expected, atol=EXACT
      )


@pytest.mark.parametrize(
  "kind, ids, shape, rules",
  [
    ("peagle", (), CHAIN, (REJECTION,)),
    slow("peagle", (), CHAIN, None),
    slow("peagle", (0, 2), draft_shape.static([-1, 0, 0, 1, 1]), (REJECTION,)),
    slow("published_peagle", (1, 3), draft_shape.chain(2), None),
  ],
)
def test_by_enumeration(kind, ids, shape, rules):
  drafter, params = learned_kinds.of_table(kind, ids, shape)
  check_drafter(drafter, learned_kinds.STREAMS, params, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind, shape",
  [
    ("peagle", CHAIN),
    ("peagle", TREE),
    ("peagle", draft_shape.chain(0)),
    ("published_peagle", draft_shape.chain(1)),
    ("published_peagle", draft_shape.dynamic(2, 3, 5)),
    ("published_peagle", CHAINS),
  ],
)
def test_of_a_transformer(kind, shape):
  check_of_a_transformer(kind, shape)


@SLOW
def test_fallback():
  """Behind copies, whose rounds leave nothing to catch up with."""
  head, (model, params) = draft_head("peagle", True), target()
  behind = drafters.from_head(head, model, CHAIN, max_external_drafts=5)
  first = drafters.lookup(5, ngram=2, min_ngram=1)
  check_drafter(
    drafters.fallback(first, behind),
    model,
    Params(params, weights("peagle", True)),
    rules=(REJECTION,),
    skip={"distribution"},
  )


# Mistakes that the two forms, or the conformance kit, must see.


def masks_without_streams(patch):
  """The masks' streams are zero where it drafts."""
  head = draft_head("peagle")

  def step(net, *args):
    net = net | {"mask_hidden": 0 * net["mask_hidden"]}
    return head.step(net, *args)

  wrong = head._replace(step=step)
  return serve.drafter.__wrapped__(wrong, target()[0], CHAIN)


def a_position_too_far(patch):
  """Masks that stand a position further after the pending token."""
  honest = attention.view

  def view(length, parents, first, count, *rest):
    seen = honest(length, parents, first, count, *rest)
    if count != K:  # only a round's draft has as many
      return seen
    return seen._replace(depth=seen.depth + (seen.depth > 0))

  patch.setattr(serve, "attention", types.SimpleNamespace(view=view))
  return serve.drafter.__wrapped__(draft_head("peagle"), target()[0], CHAIN)


def masks_left_in_the_cache(patch):
  return block_plants.served_left_in_the_cache(drafter_of("peagle"))


def blind_rounds(patch):
  """Training's slots do not see those before them in their own round."""
  honest = mask_slots.Slots.view

  def view(self, start=0):
    seen = honest(self, start)
    level = jnp.asarray(self.level)[None]
    itself = jnp.eye(level.shape[1], dtype=bool)[None]
    text = (level == 0)[:, None]
    return seen._replace(ancestors=seen.ancestors & (text | itself))

  patch.setattr(mask_slots.Slots, "view", view)
  return drafter_of("peagle")


@pytest.mark.parametrize(
  "plant",
  [
    masks_left_in_the_cache,
    blind_rounds,
    slow(masks_without_streams),
    slow(a_position_too_far),
  ],
)
def test_b21_a_plant_shows_that_training_and_drafting_differ(
  plant, monkeypatch
):
  learned_kinds.teacher.cache_clear()
  try:
    gaps = forms_apart("peagle", plant(monkeypatch))
  finally:
    learned_kinds.teacher.cache_clear()
  check_apart(gaps)


def test_the_kit_sees_masks_left_in_the_cache():
  honest, params = learned_kinds.of_table("peagle", (), CHAIN)
  wrong = block_plants.served_left_in_the_cache(honest)
  broken("state", wrong, learned_kinds.STREAMS, params)


def test_slots_see_the_text_up_to_their_root_and_their_own_round():
  rounds = jnp.array([[2, 0, 1]])
  slots = mask_slots.behind(rounds, (2, 1), 4)
  np.testing.assert_array_equal(slots.root, [[0, 1, 2, 3, 2, 0, 2]])
  assert slots.level.tolist() == [0, 0, 0, 0, 1, 1, 2]
  view = slots.view()
  np.testing.assert_array_equal(view.positions, [[0, 1, 2, 3, 3, 1, 4]])
  seen = np.zeros((7, 7), int)
  seen[:4, :4] = np.tri(4)
  seen[4, [0, 1, 2, 4]] = 1
  seen[5, [0, 5]] = 1
  seen[6, [0, 1, 2, 4, 6]] = 1
  np.testing.assert_array_equal(view.masked(7).mask[0], seen)
  tokens = slots.tokens(jnp.array([[5, 6, 7, 8]]), -1)
  np.testing.assert_array_equal(tokens, [[5, 6, 7, 8, -1, -1, -1]])


def test_a_slot_knows_no_token_behind_its_root():
  """Change a token, and see which slots notice."""
  head, draft = draft_head("peagle"), weights("peagle")
  model, params = target()
  size, rounds = 9, jnp.array([[5, 3]])
  slots = mask_slots.behind(rounds, (2, 2), size)
  rows = learned_kinds.draft_heads.target_weights_of(Params(params, draft))
  text = jnp.asarray(np.random.default_rng(0).integers(0, V, (1, size)))

  @jax.jit
  def drafted(text):
    output, _ = model.apply(params, text, None, features=head.features)
    return unroll_slots(head, draft["net"], rows, text, output, slots)

  honest = drafted(text)
  for position in range(size):
    changed = drafted(text.at[0, position].add(1) % V)
    for ours, theirs in zip(honest[1:], changed[1:]):
      for slot, root in enumerate((5, 3)):
        noticed = bool(jnp.any(ours[0, slot] != theirs[0, slot]))
        assert noticed == (position <= root), (position, root)


def test_cost_is_of_one_pass():
  head = draft_head("peagle", full=True)
  cost = head_cost.drafter_cost(head, TARGET)
  net = jax.eval_shape(head.init, jax.random.key(0))
  every = sum(x.size for x in jax.tree.leaves(net))
  assert cost.weight_bytes == 4 * every
  assert cost.step.bytes + cost.step.split_bytes == 4 * every
  for draft, tokens in ((K, K), ((3, 4), 2)):  # a tree has a slot a level
    priced = round_cost(TINY, cost, draft, 2, 50)
    parts = {name: times for name, times, _ in priced.parts}
    assert parts[f"draft, {tokens} tokens"] == 1
  assert sum(times for x, times in parts.items() if x.startswith("draft")) == 1
  cache = head.init_cache(2, 5)
  kept = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
  assert 2 * 5 * cost.position_bytes == kept


@pytest.mark.parametrize(
  "kind, changes, complaint",
  [
    ("peagle", dict(mask_token=V), "mask_token = 17; the target has 17 tokens"),
    ("peagle", dict(mask_token=-2), "mask_token = -2 of peagle: a token's id"),
    ("eagle3", dict(mask_token=3), "mask_token = 3 of eagle3: .* only peagle"),
    ("peagle", dict(features=()), "peagle needs features"),
  ],
)
def test_configs_refuse(kind, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    draft_head(kind, **changes)
