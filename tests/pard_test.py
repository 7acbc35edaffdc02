"""PARD: a draft model that drafts from masks, served and trained.

That serving is right is that a round drafts by what training computes for the
slots of the same root (trap B21), and that the conformance kit finds nothing.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
import specdec
import tiny_training
from learned_kinds import (
  BATCH,
  LENGTHS,
  TARGET,
  K,
  V,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  stumbling,
  target,
)
from planted import broken
from specdec import acceptance, draft_shape, draft_tree, drafters
from specdec.checkpoints import hf_config
from specdec.drafters import mask_slots
from specdec.models import transformer
from specdec.roofline import chips, drafter_cost, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost
from specdec.testing import check_drafter
from specdec.training import data, loop, masked, rounds
from specdec.training.masked import Masks
from specdec.training.options import Options
from specdec.training.setup import from_config
from specdec.types import ACCEPTED, CORRECTION, ModelOutput, Params
from two_forms import (
  CHAIN,
  REJECTION,
  TREE,
  check_apart,
  check_equal,
  slow,
)

MASK = 5
# Layers with a window in the draft, which sees positions, not slots.
DRAFT = dataclasses.replace(
  TARGET, num_layers=2, windows=(4, None), mask_token=MASK
)


@functools.cache
def draft():
  """(model, its weights)."""
  params = transformer.init_params(DRAFT, jax.random.key(7))
  return transformer.model(DRAFT), jax.tree.map(lambda x: 4 * x, params)


def drafter_of(shape=CHAIN):
  return drafters.pard(draft()[0], MASK, shape=shape)


@functools.cache
def taught():
  """tokens [B, T] -> log-probabilities [K, B, T, V]: level j is of what follows
  each token when the round began j tokens before."""
  model, params = draft()

  @jax.jit
  def distributions(tokens):
    size = tokens.shape[1]
    rounds = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    slots = mask_slots.behind(rounds, (size,) * (K - 1), size)
    output, _ = model.apply(
      params, slots.tokens(tokens, MASK), None, seen=slots.view()
    )
    levels = slots.by_level(jax.nn.log_softmax(output.logits))
    return jnp.stack(
      [
        jnp.pad(x[:, : size - j], ((0, 0), (j, 0), (0, 0)))
        for j, x in enumerate(levels)
      ]
    )

  return distributions


def forms_apart(drafter):
  """{level: [|log-probability handed over - trained on|]}, of texts whose
  rounds are of any length and sometimes not drafted."""
  state = speculate(stumbling(drafter), REJECTION, draft()[1], np.ones(BATCH))
  trained_on = np.asarray(taught()(state.tokens))
  tokens, handed_over, origin = (
    np.asarray(x) for x in (state.tokens, state.draft_log_probs, state.origin)
  )
  gaps = {}
  for b, (start, stop) in enumerate(zip(LENGTHS, np.asarray(state.length))):
    level = 0
    for p in range(start, stop):
      if origin[b, p] in (ACCEPTED, CORRECTION):
        theirs = trained_on[level, b, p - 1, tokens[b, p]]
        gaps.setdefault(level, []).append(abs(handed_over[b, p] - theirs))
      level = level + 1 if origin[b, p] == ACCEPTED else 0
  return gaps


def test_b21_a_chain_is_drafted_by_the_distributions_it_is_trained_on():
  check_equal(forms_apart(drafter_of()))


# Mistakes that the two forms, or the conformance kit, must see.


def masks_left_in_the_cache(patch):
  """Masks count as committed text."""
  honest = drafter_of()

  def update(params, cache, context, drafted, accept_result, output):
    accepted = accept_result.num_accepted
    return cache.replace(length=cache.length + accepted)

  return honest._replace(update=update)


def another_mask(patch):
  """Another token stands for what is not drawn."""
  return drafters.pard(draft()[0], MASK + 1, shape=CHAIN)


def a_row_too_early(patch):
  """The distribution of the level before."""
  model, _ = draft()

  def apply(params, tokens, cache, **options):
    output, cache = model.apply(params, tokens, cache, **options)
    if output.logits is not None and tokens.shape[1] == 2 * K:
      late = jnp.roll(output.logits, 1, axis=1)
      output = output._replace(logits=late)
    return output, cache

  return drafters.pard(model._replace(apply=apply), MASK, shape=CHAIN)


@pytest.mark.parametrize(
  "plant", [masks_left_in_the_cache, slow(another_mask), slow(a_row_too_early)]
)
def test_b21_a_plant_shows_that_training_and_drafting_differ(
  plant, monkeypatch
):
  check_apart(forms_apart(plant(monkeypatch)))


@pytest.mark.parametrize(
  "shape, rules",
  [
    (CHAIN, (REJECTION,)),
    slow(draft_shape.static([-1, 0, 0, 1, 1]), (REJECTION,)),
    slow(CHAIN, None),
    slow(draft_shape.chain(1), (REJECTION,)),
    slow(draft_shape.chain(0), (REJECTION,)),
    slow(
      draft_shape.static(draft_tree.parallel(2, 2), "iid"),
      (REJECTION, acceptance.kseq()),
    ),
    slow(draft_shape.dynamic(2, 3, 5), (REJECTION,)),
  ],
)
def test_by_enumeration(shape, rules):
  """A table drafts from its mask as from any token."""
  table, params = learned_kinds.TABLE, learned_kinds.TABLES
  make = functools.partial(drafters.pard, table, 2, shape=shape)
  check_drafter(make, table, params, rules=rules)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE, draft_shape.chain(1)])
def test_of_a_transformer(shape):
  """With rounds that are not drafted."""
  model, params = target()
  make = functools.cache(lambda: stumbling(drafter_of(shape), shape.loops))
  stats = check_drafter(
    make, model, Params(params, draft()[1]), rules=(REJECTION,)
  )
  assert 0 < stats.accepted.sum() < stats.evaluated.sum()
  assert np.all(stats.rounds > stats.drafted[:, 0])


@pytest.mark.slow  # as parallel_test shows of another drafter from masks
def test_the_kit_sees_masks_left_in_the_cache():
  model, params = target()
  drafter = masks_left_in_the_cache(None)
  broken("state", drafter, model, Params(params, draft()[1]))


def test_it_refuses():
  with pytest.raises(ValueError, match="mask_token = 17; the draft has 17 tok"):
    drafters.pard(draft()[0], V, 2)
  with pytest.raises(ValueError, match="mask_token = 17; it must be None"):
    dataclasses.replace(DRAFT, mask_token=V)


def test_the_mask_stands_in_config_json():
  rendered = hf_config.render(DRAFT)
  assert rendered["pard_token"] == MASK
  assert hf_config.parse(rendered, "it", "float32") == DRAFT
  without = hf_config.render(dataclasses.replace(DRAFT, mask_token=None))
  assert "pard_token" not in without


def test_cost_is_of_one_pass():
  large = Deployment(shapes.get("llama3-8b"), chips.get("v6e"))
  shape = shapes.get("llama3-1b")
  cost = drafter_cost.pard(shape)
  parts = {
    name: (times, part)
    for name, times, part in round_cost(large, cost, 4, 2, 500).parts
  }
  deployed = dataclasses.replace(large, shape=shape)
  # Four tokens and the pending one may be new, and three masks.
  assert parts == {
    "draft, 8 tokens": (1, deployed.cost(2, 8, 500)),
    "target, 5 tokens": (1, large.cost(2, 5, 500)),
  }
  assert cost.weight_bytes == drafter_cost.model(shape).weight_bytes


# Training.

BATCH_OF = dict(
  tokens=np.random.default_rng(0).integers(0, V, (3, 13)),
  step=np.full(3, 4),
  row=np.arange(3),
)
MASKS = Masks(keep=0.6, least=0.4, levels=K)


@pytest.mark.parametrize("loss", ["forward_kl", "cross_entropy"])
def test_loss_and_measures(loss):
  """Against the form that serving is compared with, at the roots drawn."""
  (model, params), (target_model, target_params) = draft(), target()
  objective = masked.distillation(model, target_model, loss, MASKS, MASK, 3)
  grade = jax.jit(jax.value_and_grad(objective, has_aux=True))
  (value, measures), gradient = grade(params, target_params, BATCH_OF)
  text, labels = BATCH_OF["tokens"][:, :-1], BATCH_OF["tokens"][:, 1:]
  goal = target_model.apply(target_params, jnp.asarray(text), None)[0].logits
  goal = np.asarray(jax.nn.log_softmax(goal), float)
  ours = np.asarray(taught()(jnp.asarray(text)), float)
  slots, row = rounds.slots_of(BATCH_OF, K, MASKS, 3), np.arange(3)[:, None]
  values = []
  for level, roots in enumerate(slots.by_level(slots.root)):
    place = np.asarray(roots) + level
    p, q = goal[row, place], ours[level][row, place]
    text_loss = -np.take_along_axis(q, labels[row, place][..., None], -1)
    values.append(
      (np.exp(p) * (p - q)).sum(-1).ravel()
      if loss == "forward_kl"
      else text_loss.ravel()
    )
    kept = np.minimum(np.exp(p), np.exp(q)).sum(-1).mean()
    same = (p.argmax(-1) == q.argmax(-1)).mean()
    for name, wanted in (("acceptance", kept), ("agreement", same)):
      found = measures[f"{name}_{level + 1}"]
      np.testing.assert_allclose(found, wanted, rtol=2e-5)
    if not level:
      entropy = measures["cross_entropy"]
      np.testing.assert_allclose(entropy, text_loss.mean(), rtol=2e-5)
  wanted = np.concatenate(values).mean()
  np.testing.assert_allclose(value, wanted, rtol=2e-5)
  assert all(np.any(x != 0) for x in jax.tree.leaves(gradient))


def test_it_learns_to_draft_several_tokens_at_once():
  """Of a target that mostly says the number one higher."""
  config = dataclasses.replace(
    tiny_training.CONFIG, width=16, mlp_width=32, mask_token=16
  )
  model = transformer.model(config)
  logits = np.zeros((17, 17), np.float32)
  logits[:16, :16] = 6 * np.roll(np.eye(16), 1, axis=1)
  counting = target()[0]._replace(
    apply=lambda params, tokens, cache: (
      ModelOutput(params[tokens], None),
      None,
    )
  )
  options = Options(
    steps=150, batch=8, sequence=12, warmup=5, learning_rate=0.02
  )
  optimizer = loop.make_optimizer(options)
  objective = masked.distillation(
    model, counting, "forward_kl", Masks(levels=3), 16
  )
  step = loop.make_step(objective, optimizer, options)
  params = transformer.init_params(config, jax.random.key(2))
  state, measured = loop.init(params, optimizer), []
  text = (np.arange(400) % 16).astype(np.int32)
  batches = data.Numbered(data.Packed(text, 12))
  for i in range(options.steps):
    state, measures = step(state, jnp.asarray(logits), batches.batch(i, 8))
    measured.append(measures)
  for level in (1, 2, 3):
    name = f"acceptance_{level}"
    print(name, measured[0][name], measured[-1][name])
    assert measured[-1][name] > 0.8 > 0.4 > measured[0][name]


SHAPE = dict(
  vocab_size=27, num_layers=1, mask_token=26, tied=True, **tiny_training.SHAPE
)


def entries(folder, **changes):
  return (
    dict(
      tokenizer=str(folder / "target"),
      target=str(folder / "target"),
      data=str(folder / "text"),
      held_out=str(folder / "text"),
      model=SHAPE,
      loss="forward_kl",
      options=tiny_training.STEPS
      | dict(steps=6, sequence=12, learning_rate=0.02),
      decoding=tiny_training.DECODING,
      masks=dict(levels=3),
    )
    | changes
  )


def test_a_run_leaves_a_draft_that_its_name_says_how_to_use(tmp_path):
  tiny_training.write_letters(tmp_path / "target")
  text = "the cat sat on the mat and the dog sat on the log while it was hot "
  (tmp_path / "text").write_text(text * 20)
  folder = tiny_training.run_program(tmp_path, "pard", **entries(tmp_path))
  log = tiny_training.log(folder, "held_out")
  assert {"acceptance_3", "agreement_1", "cross_entropy"} <= {*log[-1]}
  assert tiny_training.log(folder, "decoding")[-1]["tokens_per_pass"] >= 1
  best = folder / "best"
  assert json.loads((best / "config.json").read_text())["pard_token"] == 26
  decoder = specdec.load(str(tmp_path / "target"), drafter=f"pard({best})", k=3)
  assert decoder.drafter.name == "pard"
  assert decoder.drafter_cost.level_catch_up == 1
  with pytest.raises(ValueError, match="names no pard_token in its config"):
    specdec.load(
      str(tmp_path / "target"), drafter=f"pard({tmp_path / 'target'})"
    )


@pytest.mark.parametrize(
  "changes, complaint",
  [
    (
      dict(model=SHAPE | dict(mask_token=None)),
      "set model.mask_tok",
    ),
    (dict(target="", loss=None), "set model.mask_token and target"),
    (dict(masks=dict(levels=0)), "masks.levels = 0; it must be >= 1"),
    (dict(masks=dict(levels=13)), "options.sequence = 12; a draft of masks.le"),
  ],
)
def test_setups_refuse(tmp_path, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    from_config(entries(tmp_path, **changes))
