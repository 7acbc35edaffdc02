"""What parallel drafters are trained on, against its formulas written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import learned_kinds
import walks
from learned_kinds import IDS, V, target
from specdec.drafters.heads import draft_head as draft_heads
from specdec.training import drafting, rounds
from specdec.training.draft_losses import Loss, TokenDrop
from specdec.types import Params

K, DECAY, SEED = 3, 0.5, 7
TOKENS = np.random.default_rng(0).integers(0, V, (3, 13))
BATCH = dict(tokens=TOKENS, step=np.full(3, 4), row=np.arange(3))
DROP = TokenDrop(keep=0.6, least=0.4)


@functools.cache
def drafter(kind):
  """(head, net)."""
  head = learned_kinds.draft_head(kind, levels=K)
  return head, learned_kinds.sharpened(head.init(jax.random.key(1)), 4)


@functools.cache
def graded(kind):
  """((loss, measures), gradient)."""
  head, net = drafter(kind)
  model, params = target()
  loss = Loss("forward_kl", 0.9, decay=DECAY, drop=DROP)
  objective = drafting.objective(head, model, loss, seed=SEED)
  grade = jax.jit(jax.value_and_grad(objective, has_aux=True))
  return grade(net, params, BATCH)


@functools.cache
def by_hand(kind):
  """Of each level [(target [n, V], draft [n, tokens])] in float64, at the roots
  that are drawn, by the form that serving is compared with."""
  head, net = drafter(kind)
  model, params = target()
  draft = draft_heads.weights_of(head, net, params)
  rows = draft_heads.target_weights_of(Params(params, draft))
  text = jnp.asarray(TOKENS[:, :-1])
  output, _ = model.apply(params, text, None, features=head.features)
  ours = learned_kinds.every_round(head, net, rows, text, output)
  slots = rounds.slots_of(BATCH, K, DROP, SEED, head.start)
  levels = []
  for level, roots in enumerate(slots.by_level(slots.root)):
    roots = np.asarray(roots)
    if not level:
      roots = roots[:, head.start :]
    row, place = np.arange(3)[:, None], roots + level
    goal = special.softmax(np.asarray(output.logits, float), -1)[row, place]
    drawn = special.softmax(np.asarray(ours[level], float), -1)[row, place]
    levels.append((goal.reshape(-1, V), drawn.reshape(-1, len(IDS))))
  return levels


@pytest.mark.parametrize(
  "kind",
  [pytest.param("peagle", marks=pytest.mark.slow), "published_peagle"],
)
def test_loss_and_measures(kind):
  (loss, measures), gradient = graded(kind)
  total = slots = 0
  for level, (goal, ours) in enumerate(by_hand(kind)):
    p = goal[:, IDS]
    total += DECAY**level * 0.9 * (p * np.log(p / ours)).sum()
    slots += DECAY**level * len(goal)
    kept = np.minimum(p, ours).sum(-1).mean()
    same = (goal.argmax(-1) == IDS[ours.argmax(-1)]).mean()
    for name, value in (("acceptance", kept), ("agreement", same)):
      found = measures[f"{name}_{level + 1}"]
      np.testing.assert_allclose(found, value, rtol=2e-5)
  np.testing.assert_allclose(loss, total / slots, rtol=2e-5)
  assert all(np.any(x != 0) for x in jax.tree.leaves(gradient))


def test_slots_are_dropped_conditionally_and_drawn_by_their_address():
  def draw(drop=DROP, seed=SEED, **changes):
    slots = rounds.slots_of(BATCH | changes, K, drop, seed)
    return [np.asarray(x) for x in slots.by_level(slots.root)]

  text, first, second = draw()
  # Of 13 - 3 positions with labels for a whole draft.
  assert (text.shape, first.shape, second.shape) == ((3, 12), (3, 6), (3, 4))
  for row in range(3):
    assert text[row].tolist() == list(range(12))
    assert len({*first[row]}) == 6 and first[row].max() < 10
    assert {*second[row]} < {*first[row]}
  assert all(map(np.array_equal, draw(), (text, first, second)))
  for other in (draw(seed=8), draw(step=np.full(3, 5))):
    assert np.any(other[1] != first)
  swapped = draw(row=np.array([1, 0, 2]))
  np.testing.assert_array_equal(swapped[1], first[[1, 0, 2]])
  whole = draw(TokenDrop(keep=1.0))
  assert [x.shape[1] for x in whole] == [12, 10, 10]


def test_slots_of_evaluation_are_the_same_for_every_batch():
  one, other = (
    rounds.slots_of({"tokens": TOKENS}, K, DROP, seed).root for seed in (1, 2)
  )
  np.testing.assert_array_equal(one, other)
  assert np.all(one == one[:1])
  with pytest.raises(ValueError, match="a sequence of 2 tokens; a draft has 3"):
    rounds.slots_of({"tokens": TOKENS[:, :3]}, K, DROP, SEED)


@pytest.mark.parametrize(
  "options, complaint",
  [
    (dict(keep=1.1), "keep = 1.1; it must be in 0..1"),
    (dict(least=-0.1), "least = -0.1; it must be in 0..1"),
  ],
)
def test_shares_are_checked(options, complaint):
  with pytest.raises(ValueError, match=complaint):
    TokenDrop(**options)


def test_drop_is_of_parallel_heads():
  head = learned_kinds.draft_head("mtp")
  with pytest.raises(ValueError, match="drop belongs to peagle, not to mtp"):
    drafting.objective(head, target()[0], Loss(drop=TokenDrop()))


@pytest.mark.slow
def test_masks_learn_what_they_can_know():
  """How far a walk may have come by each level, and no more."""
  head = learned_kinds.draft_head("peagle", full=True, levels=K)
  reached = walks.learned(head, Loss("cross_entropy", decay=1.0), 600)
  assert abs(reached - np.mean(walks.entropies(K))) < 0.05
