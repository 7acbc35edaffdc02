"""What drafters are trained on, against its formulas written out."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import learned_kinds
from learned_kinds import IDS, V, sharpened, target
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.unroll import growing, unroll
from specdec.models import attention
from specdec.models.attention import View
from specdec.training import draft_losses, drafting
from specdec.types import Params

LEVELS, DECAY = 2, 0.5
TOKENS = np.random.default_rng(0).integers(0, V, (3, 8))
TOKENS[0, 3:5] = 1, 5  # not among IDS
assert not np.isin([1, 5], IDS).any()


@functools.cache
def drafter(kind):
  """(draft_head, net)."""
  head = learned_kinds.draft_head(kind, place=growing, levels=LEVELS)
  return head, sharpened(head.init(jax.random.key(1)), 4)


@functools.cache
def losses(kind, feature_weight=0.0):
  """{divergence: (loss, measures)}, of one program."""
  model, params = target()
  draft_head, net = drafter(kind)
  options = {"feature_weight": feature_weight, "decay": DECAY}
  objectives = {
    name: drafting.objective(draft_head, model, drafting.Loss(name, **options))
    for name in drafting.LOSSES
  }
  return jax.jit(
    lambda net: {
      name: objective(net, params, TOKENS)
      for name, objective in objectives.items()
    }
  )(net)


@functools.cache
def by_hand(kind):
  """The target's distribution [B, T, V], the drafter's [levels, B, T, n], its
  hidden states and the target's; float64."""
  model, params = target()
  draft_head, net = drafter(kind)
  draft = draft_heads.weights_of(draft_head, net, params)
  target_weights = draft_heads.target_weights_of(Params(params, draft))

  @jax.jit
  def run():
    text = TOKENS[:, :-1]
    output, _ = model.apply(params, text, None, features=draft_head.features)
    logits, hidden = unroll(
      draft_head, net, target_weights, text, output, LEVELS
    )
    return output.logits, jnp.stack(logits), hidden, output.hidden

  goal, ours, *hidden = jax.tree.map(lambda x: np.asarray(x, np.float64), run())
  return special.softmax(goal, -1), special.softmax(ours, -1), *hidden


def mean_of_levels(values):
  """values[j] [B, T]: of level j the first j places are nobody's."""
  parts = [DECAY**j * x[:, j:].mean() for j, x in enumerate(values)]
  return sum(parts) / sum(DECAY**j for j in range(len(values)))


def of_every_level(f, kind="mtp"):
  goal, ours, *_ = by_hand(kind)
  return [f(goal, probs) for probs in ours]


FORMULAS = {
  "forward_kl": lambda p, q: (p[..., IDS] * np.log(p[..., IDS] / q)).sum(-1),
  "reverse_kl": lambda p, q: (q * np.log(q / p[..., IDS])).sum(-1),
  # Half of what is over, and what it can never draft is over whole.
  "total_variation": lambda p, q: 1 - np.minimum(p[..., IDS], q).sum(-1),
}


def hybrid(p, q):
  """KL, and the more a token is accepted the less of it."""
  rejected = FORMULAS["total_variation"](p, q)
  share = np.exp(-3 * (1 - rejected))
  return share * FORMULAS["forward_kl"](p, q) + (1 - share) * rejected


FORMULAS["lk_hybrid"] = hybrid


@pytest.mark.parametrize("divergence", FORMULAS)
def test_distances_of_distributions(divergence):
  expected = mean_of_levels(of_every_level(FORMULAS[divergence]))
  np.testing.assert_allclose(losses("mtp")[divergence][0], expected, rtol=1e-5)


def test_cross_entropy_is_of_the_tokens_that_it_can_draft():
  after = TOKENS[:, 1:]
  covered = np.isin(after, IDS)
  place = np.minimum(np.searchsorted(IDS, after), len(IDS) - 1)

  def entropy(_, q):
    drafted = np.take_along_axis(q, place[..., None], -1)[..., 0]
    return np.where(covered, -np.log(drafted), 0)

  expected = mean_of_levels(of_every_level(entropy))
  assert not covered.all()
  loss = losses("mtp")["cross_entropy"][0]
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_measures_are_of_their_level():
  for divergence in drafting.LOSSES:  # whatever is trained on
    _, measures = losses("mtp")[divergence]
    assert len(measures) == 2 * LEVELS
    kept = of_every_level(lambda p, q: np.minimum(p[..., IDS], q).sum(-1))
    same = of_every_level(lambda p, q: p.argmax(-1) == IDS[q.argmax(-1)])
    for j in range(LEVELS):
      np.testing.assert_allclose(
        measures[f"acceptance_{j + 1}"], kept[j][:, j:].mean(), rtol=1e-5
      )
      np.testing.assert_allclose(
        measures[f"agreement_{j + 1}"], same[j][:, j:].mean(), rtol=1e-5
      )


def test_the_feature_loss_is_of_the_hidden_states():
  *_, streams, hidden = by_hand("eagle")
  off = [np.abs(stream - hidden) for stream in streams]
  smooth = [np.where(x < 1, x**2 / 2, x - 0.5).mean(-1) for x in off]
  expected = 2.0 * mean_of_levels(smooth)
  assert any((x < 1).any() and (x > 1).any() for x in off)
  with_it, without = losses("eagle", 2.0), losses("eagle")
  for divergence in ("forward_kl", "cross_entropy"):
    np.testing.assert_allclose(
      with_it[divergence][0] - without[divergence][0], expected, rtol=1e-4
    )


def test_only_eagle_has_streams_that_are_hidden_states():
  draft_head, _ = drafter("mtp")
  with pytest.raises(ValueError, match="kind 'mtp' does not predict"):
    drafting.objective(
      draft_head, target()[0], drafting.Loss(feature_weight=1.0)
    )


def test_no_measures_where_none_are_wanted():
  model, params = target()
  draft_head, net = drafter("mtp")
  aim = drafting.objective(draft_head, model, drafting.Loss(decay=DECAY), False)
  loss, measures = jax.jit(aim)(net, params, TOKENS)
  assert measures == {}
  np.testing.assert_allclose(loss, losses("mtp")["forward_kl"][0], rtol=1e-4)


@pytest.mark.parametrize(
  "entries, complaint",
  [
    (
      dict(divergence="hinge"),
      "divergence 'hinge' is unknown; known: cross_entropy, ",
    ),
    (dict(decay=-0.1), "decay = -0.1; it must be in 0..1"),
    (dict(token_weight=-1.0), "token_weight = -1.0"),
    (dict(feature_weight=-1.0), "feature_weight = -1.0"),
  ],
)
def test_losses_refuse(entries, complaint):
  with pytest.raises(ValueError, match=complaint):
    drafting.Loss(**entries)


@pytest.mark.parametrize("options", ["plain", "capped", "latent"])
def test_keys_on_a_path_are_those_that_a_mask_of_diagonals_shows(options):
  """Values and derivatives, with sinks in the softmax, too."""
  size, lags = 5, (2, 1, 0)
  rng = np.random.default_rng(0)
  shapes = dict(query=(2, size, 4, 3), keys=(2, 2, 4 * size, 3))
  shapes |= dict(values=(2, 2, 4 * size, 6), value_query=(2, size, 4, 6))
  arrays = {x: jnp.asarray(rng.normal(size=y)) for x, y in shapes.items()}
  if options != "latent":
    del arrays["value_query"]
  row, column = np.ogrid[:size, :size]
  text = column <= row - len(lags)
  parts = [text, *(column == row - lag for lag in lags)]
  start = View(jnp.zeros(2, jnp.int32), 0, jnp.zeros((1, size), int), None)

  def attended(mask, lags, arrays):
    view = start._replace(mask=jnp.stack([mask] * 2), lags=lags)
    cap = 1.5 if options == "capped" else None
    sinks = jnp.array([0.3, -1.0, 0.5, 2.0])
    y = attention.attend(
      view=view, scale=0.7, cap=cap, sink_logits=sinks, **arrays
    )
    return jnp.sum(y**2), y

  given = (text, lags), (np.concatenate(parts, axis=1), ())
  ours, theirs = (
    jax.value_and_grad(attended, argnums=2, has_aux=True)(*x, arrays)
    for x in given
  )
  chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_target_in_parts_says_the_same():
  model, params = target()
  rows = np.random.default_rng(0).integers(0, V, (2, 129))
  output, _ = model.apply(params, rows[:, :-1], None)
  labels = jnp.asarray(rows[:, 1:])
  assert labels.shape[1] == 2 * draft_losses.AT_ONCE
  head = learned_kinds.draft_head("mtp")
  assert head.ids is not None
  whole = draft_losses.aim(head, output.logits, labels)
  parts = draft_losses.aim_of_hidden(head, params, output.hidden, labels)
  for wanted, value in zip(whole, parts):
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
