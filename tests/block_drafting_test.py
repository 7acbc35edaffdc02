"""What block drafters are trained on, against its formulas written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import block_plants
import learned_kinds
import walks
from learned_kinds import IDS, V, target
from specdec.drafters.heads import block_unroll
from specdec.drafters.heads import draft_head as draft_heads
from specdec.training import block_drafting, drafting
from specdec.training.draft_losses import BlockLoss, Loss
from specdec.types import Params

K, DECAY, SEED = 3, 0.5, 7
TOKENS = np.random.default_rng(0).integers(0, V, (3, 13))
BATCH = dict(tokens=TOKENS, step=np.full(3, 4), row=np.arange(3))
ANCHORS = 6
# One program of everything that a loss can have.
EVERYTHING = dict(
  anchors=ANCHORS,
  cross_entropy_weight=0.1,
  base_weight=0.6,
  base_steps=8,  # at step 4: half of it
  confidence_weight=2.0,
)


@functools.cache
def drafter(kind="dspark"):
  """(head, net)."""
  head = learned_kinds.draft_head(kind)
  return head, learned_kinds.sharpened(head.init(jax.random.key(1)), 4)


@functools.cache
def losses(**options):
  """{divergence: ((loss, measures), gradient)}, of one program."""
  head, net = drafter()
  model, params = target()
  block = BlockLoss(**(EVERYTHING | options))

  def grade(net, batch):
    return {
      name: jax.value_and_grad(
        drafting.objective(
          head, model, Loss(name, 0.9, decay=DECAY, block=block), seed=SEED
        ),
        has_aux=True,
      )(net, params, batch)
      for name in ("forward_kl", *([] if options else ["total_variation"]))
    }

  return jax.jit(grade)(net, BATCH)


@functools.cache
def by_hand():
  """(target [B, A, K, V], draft and base [B, A, K, n], confidence and labels
  [B, A, K]) in float64, of the anchors that are drawn."""
  head, net = drafter()
  model, params = target()
  draft = draft_heads.weights_of(head, net, params)
  weights = draft_heads.target_weights_of(Params(params, draft))
  anchors = block_drafting.anchors_of(BATCH, ANCHORS, K, SEED)

  @jax.jit
  def run():
    text = jnp.asarray(TOKENS[:, :-1])
    output, _ = model.apply(params, text, None, features=head.features)
    context = block_unroll.context_of(head, net, output)
    unrolled = block_unroll.unroll(head, net, weights, text, context, anchors)
    return output.logits, *unrolled[:3]

  logits, *ours, sure = jax.tree.map(lambda x: np.asarray(x, float), run())
  rows = np.arange(3)[:, None, None]
  places = np.asarray(anchors)[:, :, None] + np.arange(K)
  goal = special.softmax(logits, -1)[rows, places]
  ours = [special.softmax(x, -1) for x in ours]
  return goal, *ours, special.expit(sure), TOKENS[rows, places + 1]


def accepted(goal, ours):
  return np.minimum(goal[..., IDS], ours).sum(-1)


def kl(goal, ours):
  p = goal[..., IDS]
  return (p * np.log(p / ours)).sum(-1)


def text_loss(ours, labels):
  """-log of the text's tokens, 0 of those that cannot be drafted."""
  place = np.minimum(np.searchsorted(IDS, labels), len(IDS) - 1)
  drafted = np.take_along_axis(ours, place[..., None], -1)[..., 0]
  return np.where(np.isin(labels, IDS), -np.log(drafted), 0)


def expected(divergence, weights, mean=lambda x, w: (w * x).sum() / w.sum()):
  """The whole loss, with weights [..., K] of the levels of a draft's loss."""
  goal, ours, base, sure, labels = by_hand()
  total = 0
  for share, drafted in ((0.7, ours), (0.3, base)):
    text = text_loss(drafted, labels)
    value = 0.9 * divergence(goal, drafted) + 0.1 * text
    weight = np.broadcast_to(weights(text), value.shape)
    total += share * mean(value, weight)
  aim = accepted(goal, ours)
  entropy = -aim * np.log(sure) - (1 - aim) * np.log(1 - sure)
  weight = np.broadcast_to(weights(text_loss(ours, labels)), entropy.shape)
  return total + 2.0 * mean(entropy, weight)


DIVERGENCES = {
  "forward_kl": kl,
  "total_variation": lambda goal, ours: 1 - accepted(goal, ours),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_levels_decay(name):
  wanted = expected(DIVERGENCES[name], lambda _: DECAY ** np.arange(K))
  np.testing.assert_allclose(losses()[name][0][0], wanted, rtol=1e-5)


def test_dpace_weighs_what_a_level_is_worth():
  """A token that cannot be drafted is accepted by no chance."""
  labels = by_hand()[-1]
  assert 0.1 < np.isin(labels, IDS).mean() < 0.9

  def weights(text):
    right = 0.5 * np.where(np.isin(labels, IDS), np.exp(-text), 0) + 0.5
    reached = np.cumprod(right, -1)
    return np.stack([reached[..., j:].sum(-1) for j in range(K)], -1)

  wanted = expected(kl, weights, lambda x, w: (w * x).mean())
  loss = losses(weighting="dpace")["forward_kl"][0][0]
  np.testing.assert_allclose(loss, wanted, rtol=1e-5)
  assert abs(wanted - expected(kl, lambda _: DECAY ** np.arange(K))) > 1e-3


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_parts_of_a_batch_make_up_its_loss(weighting):
  """So that neither accumulation nor a mesh changes what is learned; evaluation
  weighs by decay, which no draft can move."""
  head, net = drafter()
  model, params = target()
  block = BlockLoss(**(EVERYTHING | {"weighting": weighting}))
  loss = Loss("forward_kl", decay=DECAY, block=block)
  grade = jax.jit(drafting.objective(head, model, loss, seed=SEED))
  whole = grade(net, params, BATCH)[0]
  rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], BATCH) for i in range(3)]
  parts = [grade(net, params, row)[0] for row in rows]
  np.testing.assert_allclose(np.mean(parts), whole, rtol=1e-6)
  judged = grade(net, params, {"tokens": BATCH["tokens"]})[0]
  decayed = dataclasses.replace(block, weighting="decay")
  same = dataclasses.replace(loss, block=decayed)
  again = jax.jit(drafting.objective(head, model, same, seed=SEED))
  np.testing.assert_array_equal(
    judged, again(net, params, {"tokens": BATCH["tokens"]})[0]
  )


def test_measures():
  goal, ours, _, sure, _ = by_hand()
  kept = accepted(goal, ours)
  _, measures = losses()["forward_kl"][0]
  same = goal.argmax(-1) == IDS[ours.argmax(-1)]
  for j in range(K):
    for name, value in (("acceptance", kept), ("agreement", same)):
      measured = measures[f"{name}_{j + 1}"]
      np.testing.assert_allclose(measured, value[..., j].mean(), rtol=1e-5)
  length = kept[..., 0] * (1 + kept[..., 1] * (1 + kept[..., 2]))
  np.testing.assert_allclose(
    measures["accepted_length"], length.mean(), rtol=1e-5
  )
  np.testing.assert_allclose(
    measures["confidence_error"], np.abs(sure - kept).mean(), rtol=1e-4
  )


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_a_few_anchors_at_once_are_all_of_them(weighting):
  whole, parts = (
    losses(weighting=weighting, **options)["forward_kl"]
    for options in ({}, {"at_once": 2})
  )
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, parts, whole)


def test_every_weight_learns():
  """And `base_weight` and `confidence_weight` are of something."""
  _, gradient = losses()["forward_kl"]
  assert all(np.any(x != 0) for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_a_selector_learns_the_targets_choice_among_candidates(weighting):
  """The slots' own distributions by the divergence, and the selector's by
  cross-entropy; a label that is no candidate takes the last one's place."""
  head, net = drafter("dflash2")
  model, params = target()
  block = head.head_config.block
  # With all tokens as candidates, the scores of all.
  wide = learned_kinds.draft_head(
    "dflash2", block=dataclasses.replace(block, candidates=len(IDS))
  )
  options = BlockLoss(anchors=ANCHORS, selector_weight=0.7, weighting=weighting)
  loss = Loss("forward_kl", decay=DECAY, block=options)
  objective = drafting.objective(head, model, loss, seed=SEED)
  draft = draft_heads.weights_of(head, net, params)
  rows = draft_heads.target_weights_of(Params(params, draft))
  anchors = block_drafting.anchors_of(BATCH, ANCHORS, K, SEED)

  @jax.jit
  def run(net):
    grade = jax.value_and_grad(objective, has_aux=True)(net, params, BATCH)
    text = jnp.asarray(TOKENS[:, :-1])
    output, _ = model.apply(params, text, None, features=head.features)
    context = block_unroll.context_of(wide, net, output)
    scored, served = (
      block_unroll.unroll(x, net, rows, text, context, anchors)
      for x in (wide, head)
    )
    return grade, output.logits, scored.base, scored.logits, served.logits

  ((value, measures), gradient), *rest = jax.tree.map(np.asarray, run(net))
  logits, base, scores, served = (x.astype(float) for x in rest)
  row = np.arange(3)[:, None, None]
  places = np.asarray(anchors)[:, :, None] + np.arange(K)
  goal = special.softmax(logits, -1)[row, places]
  best = goal.argmax(-1)
  draftable = np.isin(best, IDS)
  label = np.where(draftable, np.searchsorted(IDS, best), 0)[..., None]
  chosen = np.argsort(-base, axis=-1)[..., : block.candidates]
  listed = (chosen == label).any(-1)
  assert 0.1 < listed[draftable].mean() < 0.9
  chosen[..., -1:] = np.where(listed[..., None], chosen[..., -1:], label)
  among = np.take_along_axis(scores, chosen, -1)
  score = np.take_along_axis(scores, label, -1)[..., 0]
  entropy = np.where(draftable, special.logsumexp(among, -1) - score, 0)
  slots = special.softmax(base, -1)

  def weighed(value, text, possible):
    weight = DECAY ** np.arange(K)
    if weighting == "dpace":
      right = np.where(possible, np.exp(-text), 0)
      reached = np.cumprod(0.5 * right + 0.5, -1)
      weight = np.flip(np.cumsum(np.flip(reached, -1), -1), -1)
    weight = np.broadcast_to(weight, value.shape)
    count = value.size if weighting == "dpace" else weight.sum()
    return (weight * value).sum() / count

  labels = TOKENS[row, places + 1]
  text = text_loss(slots, labels)
  wanted = weighed(kl(goal, slots), text, np.isin(labels, IDS))
  wanted += 0.7 * weighed(entropy, entropy, listed & draftable)
  np.testing.assert_allclose(value, wanted, rtol=2e-5)
  recall = (listed & draftable).mean()
  np.testing.assert_allclose(measures["candidate_recall"], recall, rtol=1e-6)
  kept = accepted(goal, special.softmax(served, -1))
  for j in range(K):
    measured = measures[f"acceptance_{j + 1}"]
    np.testing.assert_allclose(measured, kept[..., j].mean(), rtol=2e-5)
  assert all(np.any(x != 0) for x in jax.tree.leaves(gradient))


def test_what_a_loss_aims_at_is_not_trained():
  """The confidence's aim and D-PACE's weights depend on the draft's q."""
  (_, gradient), (_, without) = (
    losses(**options)["forward_kl"]
    for options in ({}, {"confidence_weight": 4.0})
  )
  table = "successor", "second"  # reaches q alone
  both = [functools.reduce(dict.get, table, x) for x in (gradient, without)]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *both)
  assert max(np.abs(x).max() for x in jax.tree.leaves(both)) > 0
  q = jnp.asarray([0.9, 0.4, 0.7])
  slopes = jax.grad(lambda q: block_drafting.dpace_weights(q, 0.5).sum())(q)
  np.testing.assert_array_equal(slopes, 0.0)


def test_evaluation_is_of_the_end_of_training():
  """Where base_weight has fallen to 0."""
  head, net = drafter()
  model, params = target()
  batch = {"tokens": TOKENS}
  fallen, never = (
    drafting.objective(
      head,
      model,
      Loss(
        decay=DECAY, block=BlockLoss(ANCHORS, confidence_weight=1.0, **options)
      ),
    )(net, params, batch)[0]
    for options in (dict(base_weight=0.6, base_steps=8), {})
  )
  assert fallen == never


def test_anchors_are_drawn_by_their_address():
  def draw(count, seed=SEED, **changes):
    return np.asarray(
      block_drafting.anchors_of(BATCH | changes, count, K, seed)
    )

  some, every = draw(4), draw(99)
  assert some.shape == (3, 4) and every.shape == (3, 10)
  for row in every:  # each has K labels after it: the last is position 12
    assert sorted(row) == list(range(10))
  assert all(len(set(row)) == 4 for row in some)
  np.testing.assert_array_equal(some, draw(4))
  for other in (draw(4, seed=8), draw(4, step=np.full(3, 5))):
    assert np.any(other != some)
  swapped = draw(4, row=np.array([1, 0, 2]))
  np.testing.assert_array_equal(swapped, some[[1, 0, 2]])


def test_anchors_of_evaluation_are_evenly_spaced():
  batch = {"tokens": TOKENS}
  even = block_drafting.anchors_of(batch, 4, K, SEED)
  np.testing.assert_array_equal(even, [[0, 3, 6, 9]] * 3)
  with pytest.raises(ValueError, match="a sequence of 2 tokens; a block draf"):
    block_drafting.anchors_of({"tokens": TOKENS[:, :3]}, 4, K, SEED)


@pytest.mark.parametrize("kind", ["dflash", "windowed"])
def test_a_block_sees_what_is_before_its_anchor_and_in_its_window(kind):
  head, net = drafter(kind)
  anchor, size = 5, 9
  model, params = target()
  weights = draft_heads.target_weights_of(
    Params(params, draft_heads.weights_of(head, net, params))
  )
  text = jnp.asarray(TOKENS[:1, :size])
  output, _ = model.apply(params, text, None, features=head.features)

  @jax.jit
  def drafted(encoded):
    context = head.context(net, encoded, jnp.arange(size)[None])
    return block_unroll.unroll(
      head, net, weights, text, context, jnp.array([[anchor]])
    ).logits[0, 0]

  encoded = head.encode(net, output)
  honest = drafted(encoded)
  window, any_seen = head.head_config.block.window or size, False
  for position in range(size):
    other = drafted(encoded.at[:, position].add(1.0))
    changed = np.any(np.asarray(other != honest), axis=-1)
    for draft in range(K):
      slot = anchor + head.head_config.block.offset + draft  # its position
      seen = position < anchor and slot - position < window
      assert changed[draft] == seen, (position, draft)
      any_seen |= seen
  assert any_seen


@pytest.mark.parametrize(
  "plant",
  [
    block_plants.train_its_own_position,
    block_plants.train_no_context,
    block_plants.train_a_token_too_far,
  ],
)
def test_mistakes_of_the_ablations_change_a_loss(plant, monkeypatch):
  head, net = drafter("dflash")
  model, params = target()

  def loss():
    return jax.jit(drafting.objective(head, model, Loss(), seed=SEED))(
      net, params, BATCH
    )[0]

  honest = loss()
  plant(monkeypatch)
  assert abs(loss() - honest) > 1e-3


@pytest.mark.parametrize(
  "options, complaint",
  [
    (dict(anchors=0), "loss.block.anchors = 0; it must be >= 1"),
    (
      dict(weighting="pace"),
      "loss.block.weighting 'pace' is unknown; known: decay, dpa",
    ),
    (dict(smoothing=2.0), "loss.block.smoothing = 2.0; it must be in 0..1"),
    (dict(base_weight=1.5), "loss.block.base_weight = 1.5; it must be in 0..1"),
    (dict(confidence_weight=-1.0), "loss.block.confidence_weight = -1.0"),
    (dict(selector_weight=-1.0), "loss.block.selector_weight = -1.0"),
  ],
)
def test_losses_refuse(options, complaint):
  with pytest.raises(ValueError, match=complaint):
    BlockLoss(**options)


@pytest.mark.parametrize("step", [True, False])
def test_anchors_at_once_that_do_not_divide_the_places(step, monkeypatch):
  """Of the 7 places of a sequence, three at a time, or five."""
  head, net = drafter()
  model, params = target()
  batch = {"tokens": TOKENS[:, : 7 + K]}
  batch = BATCH | batch if step else batch
  honest, seen = block_unroll.unroll, []

  def unroll(*args):
    seen.append(args[-2].shape[1])
    return honest(*args)

  monkeypatch.setattr(block_drafting, "unroll", unroll)

  def grade(at_once):
    block = BlockLoss(**EVERYTHING | dict(anchors=12, at_once=at_once))
    loss = Loss(decay=DECAY, block=block)
    objective = drafting.objective(head, model, loss, seed=SEED)
    grade = jax.value_and_grad(objective, has_aux=True)
    return jax.jit(grade)(net, params, batch)

  whole = grade(0)
  assert max(seen) == 7
  seen.clear()
  for at_once in (3, 5):
    parts = grade(at_once)
    assert max(seen) <= at_once
    seen.clear()
    np.testing.assert_allclose(parts[0][0], whole[0][0], rtol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, parts, whole)


def test_options_of_blocks_are_of_blocks():
  head = learned_kinds.draft_head("mtp")
  loss = Loss(block=BlockLoss())
  with pytest.raises(ValueError, match="belongs to a block drafter"):
    drafting.objective(head, target()[0], loss)


@pytest.mark.slow
def test_slots_learn_what_they_can_know():
  """Slots that know nothing of each other learn how far a walk may have come;
  a successor learns its next step."""
  entropies, reached = walks.entropies(K), {}
  weights = 0.8 ** np.arange(K)
  alone = (weights * entropies).sum() / weights.sum()
  for kind in ("dflash", "dspark"):
    block = learned_kinds.head_config(kind).block
    block = dataclasses.replace(block, confidence=False)
    head = learned_kinds.draft_head(kind, full=True, num_layers=2, block=block)
    loss = Loss("cross_entropy", block=BlockLoss(anchors=8))
    reached[kind] = walks.learned(head, loss, 400)
  assert abs(reached["dflash"] - alone) < 0.05
  assert abs(reached["dspark"] - entropies[0]) < 0.05 < alone - entropies[0]
