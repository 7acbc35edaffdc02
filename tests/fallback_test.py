"""A drafter behind another: copies first, a learned drafter for the rest.

Prompts, target and drafters are learned_test's. Who drafts is scripted, so that
rounds are all copied, all drafted, and mixed.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_distribution_test as learned_distribution
import table_loop
import text_statistics as table_distribution
from learned_kinds import KINDS, V, draft_head, head_config, target, weights
from learned_test import (
  BATCH,
  COUPLED,
  LENGTHS,
  REJECTION,
  K,
  L,
  baseline,
  differences,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  teacher,
)
from specdec import acceptance, draft_shape, draft_tree, drafters, noise
from specdec.drafters.heads import serve
from specdec.testing import table_model
from specdec.testing.books import check_books
from specdec.types import Draft
from table_loop import record  # noqa: F401, a fixture
from texts import texts

COPIED = 5  # draft tokens of a copy, more than K
SLOW = pytest.mark.slow
BEHIND = [kind for kind in KINDS if not head_config(kind).exits]
CALLS = []


@pytest.fixture(scope="module", params=BEHIND)
def kind(request):
  return request.param


def scripted(copies):
  """The same, in rounds 2 and 3 of four in every row, in the fourth in rows of
  even length, in the first in none."""

  def init(params, context, output):
    return jnp.zeros_like(context.length)

  def propose(params, turn, context):
    draft, _ = copies.propose(params, None, context)
    turns = turn % 4
    copied = (turns == 1) | (turns == 2)
    copied |= (turns == 3) & (context.length % 2 == 0)
    return draft._replace(count=jnp.where(copied, draft.count, 1)), turn

  def update(params, turn, *rest):
    return turn + 1

  return copies._replace(init=init, propose=propose, update=update)


def counted(learned):
  """The same; CALLS gets an entry whenever a device runs it."""

  def propose(params, state, context):
    jax.debug.callback(lambda: CALLS.append(1))
    return learned.propose(params, state, context)

  return learned._replace(propose=propose)


@functools.cache
def copies(k=COPIED):
  return scripted(drafters.lookup(k, ngram=2, min_ngram=0))


def learned_of(kind, k=K, max_external_drafts=COPIED):
  return serve.drafter(
    draft_head(kind, full=True),
    target()[0],
    draft_shape.chain(k),
    max_external_drafts=max_external_drafts,
  )


@functools.cache
def drafter_of(kind):
  return drafters.fallback(copies(), learned_of(kind))


def test_the_coupled_rules_text_is_autoregressive_texts(kind):
  state = speculate(drafter_of(kind), COUPLED, weights(kind, True))
  assert texts(state) == baseline()
  check_books(state, LENGTHS)
  assert np.all(np.asarray(state.stats.widths) > 0)  # K + 1, COPIED + 1
  assert np.asarray(state.stats.accepted)[:, K].sum() > 0  # of a copy alone


@pytest.mark.parametrize(
  "k, copied", [(K, 1), (0, 2), pytest.param(K, K, marks=SLOW)]
)
def test_whatever_the_lengths_and_where_it_ends(k, copied):
  drafter = drafters.fallback(copies(copied), learned_of("eagle", k, copied))
  widths = {k + 1, copied + 1}
  assert drafter.spec.widths == tuple(sorted(widths))
  draft = weights("eagle", True)
  assert texts(speculate(drafter, COUPLED, draft)) == baseline()
  common = int(np.bincount(np.concatenate(baseline())).argmax())
  state = speculate(drafter, COUPLED, draft, end=common)
  assert texts(state) == baseline(common)
  assert np.any(np.asarray(state.length) < L)


def test_it_is_drafted_by_the_distributions_it_is_trained_on(kind):
  """B21, whoever made the draft tokens of the rounds before."""
  found = forms_apart(kind, drafter_of(kind))
  assert len(found[0]) > 20 and len(found) == K
  for level, off in found.items():
    assert max(off) < 1e-4, level


def forms_apart(kind, drafter):
  draft = weights(kind, True)
  state = speculate(drafter, REJECTION, draft, np.ones(BATCH))
  said = np.asarray(state.draft_log_probs)
  sure = (said == 0) | np.isneginf(said)  # a copy
  assert sure.sum() > 20
  # What was copied counts as never guessed; its levels are none of K's.
  origin = np.where(sure, -1, np.asarray(state.origin))
  state = state.replace(origin=origin)
  return differences(state, teacher(kind, True)(state.tokens, draft))


@pytest.mark.parametrize(
  "kind", ["eagle3", *(pytest.param(k, marks=SLOW) for k in ("eagle", "mtp"))]
)
def test_a_pending_token_that_was_never_run_is_seen(kind):
  """As where a round that does not ask the drafter leaves its cache a hole."""
  careless = learned_of(kind, max_external_drafts=0)
  careless = careless._replace(
    spec=careless.spec._replace(max_external_drafts=K)
  )
  found = forms_apart(kind, drafters.fallback(copies(K), careless))
  assert max(max(off) for off in found.values()) > 1e-3


def test_rounds_of_copies_alone_do_not_run_the_other():
  learned = counted(learned_of("eagle"))
  drafter = drafters.fallback(copies(), learned)
  CALLS.clear()
  state = speculate(drafter, COUPLED, weights("eagle", True), most=6)
  jax.effects_barrier()
  assert texts(state) == [
    text[: len(ours)] for text, ours in zip(baseline(), texts(state))
  ]
  assert len(CALLS) == 3  # rounds 1, 4 and 5


def distribution_drafter(kind, ids):
  """On the table of decode_law_test; copies where one token stood before."""
  _, params = learned_distribution.drafter_of(kind, ids, "chain")
  own = drafters.LEARNED[kind](
    head_config(kind, len(ids)),
    learned_distribution.TARGET,
    np.array(ids) if ids else None,
  )
  learned = serve.drafter(
    own,
    table_model.model(table_distribution.V),
    draft_shape.chain(2),
    max_external_drafts=3,
  )
  first = drafters.lookup(3, ngram=2, min_ngram=2)
  return drafters.fallback(first, learned), params


@pytest.mark.parametrize(
  "kind, ids, rule",
  [
    ("eagle", (0, 2), acceptance.rejection),
    ("mtp", (), acceptance.block),
    pytest.param("medusa", (1, 2), acceptance.block, marks=SLOW),
    pytest.param("prophet", (), acceptance.rejection, marks=SLOW),
  ],
)
def test_texts_follow_the_targets_distribution(kind, ids, rule):
  drafter, params = distribution_drafter(kind, ids)
  found = table_distribution.sample(drafter, rule(), params=params)
  p = [
    table_distribution.p_value(*pair)
    for pair in zip(found, table_distribution.EXACT)
  ]
  assert min(p) > table_distribution.SMALLEST_P, p
  assert p[-1] == 1.0  # greedy rows: one text, every time


def test_a_copy_with_the_others_distribution_is_caught():
  honest, params = distribution_drafter("mtp", ())

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    flat = jnp.full_like(draft.log_probs, -jnp.log(table_distribution.V))
    sure = jnp.any(jnp.isneginf(draft.log_probs), axis=-1, keepdims=True)
    return draft._replace(
      log_probs=jnp.where(sure, flat, draft.log_probs)
    ), state

  liar = honest._replace(propose=propose)
  [texts] = table_distribution.sample(
    liar,
    acceptance.rejection(),
    groups=table_distribution.GROUPS[:1],
    params=params,
  )
  assert (
    table_distribution.p_value(texts, table_distribution.EXACT[0])
    < table_distribution.SMALLEST_P
  )


@pytest.mark.parametrize("rule", [acceptance.rejection(), acceptance.block()])
def test_a_distribution_of_one_token_is_no_distribution(rule):
  """Rules make the same of certainty that is said and of certainty unsaid."""
  logits = jax.random.normal(jax.random.key(0), (4, V))
  distribution = jax.nn.log_softmax(logits)
  tokens = jnp.array([3, 5, 5, 1])
  certain = jnp.log(jax.nn.one_hot(tokens, V))
  said, unsaid = (
    Draft(tokens, draft_tree.chain(4), distributions, jnp.int32(4))
    for distributions in (certain, None)
  )
  np.testing.assert_array_equal(
    rule.accept_prob(said, distribution), rule.accept_prob(unsaid, distribution)
  )
  for node in range(4):
    np.testing.assert_array_equal(
      rule.residual(said, distribution, node),
      rule.residual(unsaid, distribution, node),
    )


def test_no_address_of_noise_repeats(record):  # noqa: F811
  drafter, params = distribution_drafter("mtp", ())
  for row in range(2):
    table_loop.generate(
      acceptance.rejection(),
      drafter,
      rows=slice(row, row + 1),
      index=jnp.array([row]),
      target=table_model.model(table_distribution.V),
      params=params,
      prompt=table_loop.PROMPT % table_distribution.V,
    )
  jax.effects_barrier()
  counts = collections.Counter(record)
  assert max(counts.values()) == 1
  streams = {place[0] for _, place in counts}
  assert streams == {noise.DRAFT, noise.ACCEPT, noise.NEXT}


class TestRefusals:
  def test_more_copies_than_the_other_takes(self):
    with pytest.raises(
      ValueError, match=r"after 5 draft tokens .* lookup drafts 6"
    ):
      drafters.fallback(drafters.lookup(6), learned_of("eagle"))

  def test_a_drafter_that_draws_first(self):
    with pytest.raises(ValueError, match="must be deterministic"):
      drafters.fallback(learned_of("eagle"), learned_of("eagle"))

  def test_trees(self):
    shape = draft_shape.static(draft_tree.from_paths([(0,), (1,)]))
    forest = serve.drafter(
      draft_head("eagle"), target()[0], shape, max_external_drafts=5
    )
    with pytest.raises(ValueError, match="takes chains"):
      drafters.fallback(drafters.lookup(2), forest)

  @pytest.mark.parametrize("kind", ["recycle", "head"])
  def test_an_exit(self, kind):
    with pytest.raises(ValueError, match="an early exit cannot stand behind"):
      learned_of(kind)
