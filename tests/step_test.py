"""The four seams of a round, each compiled alone, give what a round gives."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from specdec import (
  acceptance,
  decode,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
  step,
  traversal,
)
from specdec.drafters.heads import serve
from specdec.types import Params

EOS = np.array([1], np.int32)
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2])
CHAINS = draft_shape.static(draft_tree.parallel(2, 2), "iid")


def head(target):
  return serve.drafter(learned_kinds.draft_head("eagle"), target, CHAINS)


DRAFTERS = {
  "lookup": lambda _: drafters.lookup(3, ngram=2, min_ngram=1),  # two widths
  "early_exit": lambda target: drafters.early_exit(target, 1, shape=TREE),
  "head": head,
}


def started(name):
  target, weights = learned_kinds.target()
  params = Params(weights, learned_kinds.weights("eagle"))
  prompt = jnp.tile(jnp.array([[3, 4, 5, 3, 4, 5, 3]]), (3, 1))
  drafter, rule = DRAFTERS[name](target), acceptance.rejection()
  state = decode.start(
    target,
    drafter,
    rule,
    params,
    prompt,
    jnp.array([7, 5, 6]),
    jax.random.key(0),
    max_length=20,
    sampling=sampling.settings(3, [0.0, 1.0, 1.0]),
    limit=jnp.array([20, 20, 6]),  # the last row is done
  )
  return target, drafter, rule, params, state


def jitted(function, *static):
  return jax.jit(functools.partial(function, *static))


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_seams_compose_to_a_round(name):
  target, drafter, rule, params, state = started(name)
  spec = drafter.spec
  parts = target, drafter, rule
  whole = jitted(step.decode_step, *parts)
  for _ in range(2):
    expected = whole(params, state, EOS)
    draft, state = jitted(step.draft_step, *parts)(params, state)
    needed = int(jnp.max(jnp.where(state.done, 1, draft.count)))
    width = next(width for width in spec.widths if width >= needed)
    draft = step.first_nodes(draft, width)
    verify = jitted(step.verify_step, target, spec)
    output, state = verify(params.target, state, draft)
    accept = jitted(step.accept_step, rule, spec)
    outcome = accept(draft, output.logits, state, EOS)
    commit = jitted(step.commit_step, *parts)
    state = commit(params, state, draft, output, *outcome)
    counts = ["tokens", "length", "done", "fault", "stats", "origin"]
    chex.assert_trees_all_equal(
      *([getattr(x, name) for name in counts] for x in (state, expected))
    )
    keys = [x.replace(keys=None) for x in (state, expected)]
    chex.assert_trees_all_close(*keys, rtol=1e-4, atol=1e-5)
  assert int(state.stats.rounds[0]) == 2


def test_idle_rounds_need_a_width_of_their_own():
  target, drafter, rule, params, state = started("lookup")
  spec = drafter.spec._replace(widths=(drafter.spec.max_nodes,))
  idle = drafter._replace(spec=spec, idle=lambda _: jnp.array(False))
  one_round = functools.partial(step.decode_step, target, idle, rule)
  with pytest.raises(ValueError, match="1 must be among its widths"):
    jax.eval_shape(one_round, params, state, EOS)


def test_a_seam_refuses_arrays_that_do_not_fit():
  target, _ = learned_kinds.target()
  spec, rule = draft_shape.chain(3).spec, acceptance.rejection()
  state = types.SimpleNamespace(length=jnp.zeros(3, int))
  logits = jnp.zeros((3, 4, target.vocab_size))
  draft = step.Draft(jnp.zeros((3, 4), int), None, logits, jnp.ones(3, int))
  short = draft._replace(count=draft.count[:2])
  with pytest.raises(AssertionError, match="shape"):
    step.verify_step(target, spec, None, state, short)
  narrow = draft._replace(log_probs=logits[..., 1:])
  for drafted, output, ends, wrong in (
    (draft, logits[0], EOS, "rank"),
    (draft, logits, EOS.astype(float), "type"),
    (narrow, logits, EOS, "shape"),
  ):
    with pytest.raises(AssertionError, match=wrong):
      step.accept_step(rule, spec, drafted, output, state, ends)


def test_a_rule_is_given_arrays_that_fit():
  rule, facing = acceptance.rejection(), jnp.zeros((2, 3, 4))
  draft = step.Draft(
    jnp.zeros((2, 3), int), draft_tree.chain(3), facing, jnp.ones(2, int)
  )
  traversal.accept_probs(rule, draft, facing)
  for changes in (
    {"tokens": draft.tokens[:, 1:]},
    {"tokens": facing[..., 0]},
    {"parents": draft_tree.chain(4)},
    {"log_probs": facing[..., 1:]},
    {"count": draft.count[:1]},
  ):
    with pytest.raises(AssertionError):
      traversal.accept_probs(rule, draft._replace(**changes), facing)
  with pytest.raises(AssertionError):
    traversal.residuals(rule, draft, facing, jnp.zeros(3, int))
