"""A drafter after another: copies first, a learned drafter for the rest.

Who drafts is scripted, so that rounds are all copied, all drafted, and mixed.
Distributions of whole texts: conformance_test.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
import table_loop
from learned_kinds import (
  BATCH,
  KINDS,
  LENGTHS,
  K,
  L,
  baseline,
  differences,
  draft_head,
  head_config,
  small_chunks,  # noqa: F401, a fixture
  speculate,
  target,
  weights,
)
from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  drafters,
  noise,
)
from specdec.drafters.heads import serve
from specdec.testing.books import check_books
from specdec.types import Sparse
from table_loop import record  # noqa: F401, a fixture
from texts import texts

COUPLED, REJECTION = acceptance.coupled(), acceptance.rejection()
CHAIN = draft_shape.chain(K)
COPIED = 5  # draft tokens of a copy, more than K
SLOW = pytest.mark.slow
BEHIND = [kind for kind in KINDS if not head_config(kind).exits]
CALLS = []


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


def learned_of(kind, shape=CHAIN, max_external_drafts=COPIED):
  return serve.drafter(
    draft_head(kind, full=True),
    target()[0],
    shape,
    max_external_drafts=max_external_drafts,
  )


@functools.cache
def drafter_of(kind):
  return drafters.fallback(copies(), learned_of(kind))


@pytest.mark.parametrize(
  "kind",
  ["eagle", *(pytest.param(k, marks=SLOW) for k in BEHIND if k != "eagle")],
)
def test_the_coupled_rules_text_is_autoregressive_texts(kind):
  state = speculate(drafter_of(kind), COUPLED, weights(kind, True))
  assert texts(state) == baseline()
  check_books(state, LENGTHS)
  assert np.all(np.asarray(state.stats.widths) > 0)  # K + 1, COPIED + 1
  assert np.asarray(state.stats.accepted)[:, K].sum() > 0  # of a copy alone


@pytest.mark.parametrize(
  "rule, temperature",
  [(COUPLED, learned_kinds.TEMPERATURES), (REJECTION, np.zeros(BATCH))],
)
def test_one_that_drafts_in_the_targets_scratch(rule, temperature):
  """Of the cache that the copies' rounds leave as it was."""
  model, _ = target()
  drafter = drafters.fallback(copies(), drafters.sparse(model, Sparse(3), K))
  state = speculate(drafter, rule, None, temperature)
  plain = speculate(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, None, temperature)
  assert texts(state) == texts(plain)
  check_books(state, LENGTHS)
  assert np.all(np.asarray(state.stats.widths) > 0)  # K + 1, COPIED + 1


@pytest.mark.parametrize(
  "k, copied", [(K, 1), (0, 2), pytest.param(K, K, marks=SLOW)]
)
def test_whatever_the_lengths_and_where_it_ends(k, copied):
  drafter = drafters.fallback(
    copies(copied), learned_of("eagle", draft_shape.chain(k), copied)
  )
  widths = {k + 1, copied + 1}
  assert drafter.spec.widths == tuple(sorted(widths))
  draft = weights("eagle", True)
  assert texts(speculate(drafter, COUPLED, draft)) == baseline()
  common = int(np.bincount(np.concatenate(baseline())).argmax())
  state = speculate(drafter, COUPLED, draft, end=common)
  assert texts(state) == baseline(common)
  assert np.any(np.asarray(state.length) < L)


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param(kind, marks=() if kind in ("eagle3", "prophet") else SLOW)
    for kind in BEHIND  # with a cache, and without
  ],
)
def test_it_is_drafted_by_the_distributions_it_is_trained_on(kind):
  """B21, whoever drafted the rounds before."""
  gaps = forms_apart(kind, drafter_of(kind))
  assert len(gaps[0]) > 20 and len(gaps) == K
  for level, values in gaps.items():
    assert max(values) < 1e-4, level


def forms_apart(kind, drafter):
  draft = weights(kind, True)
  state = speculate(drafter, REJECTION, draft, np.ones(BATCH))
  log_probs = np.asarray(state.draft_log_probs)
  copied = (log_probs == 0) | np.isneginf(log_probs)
  assert copied.sum() > 20
  # What was copied counts as not drafted; its levels are none of K's.
  origin = np.where(copied, -1, np.asarray(state.origin))
  return differences(kind, True, state, origin)


@pytest.mark.parametrize(
  "kind", ["eagle3", *(pytest.param(k, marks=SLOW) for k in ("eagle", "mtp"))]
)
def test_a_pending_token_that_was_never_run_is_seen(kind):
  """As where a round that does not ask the drafter leaves its cache a hole."""
  careless = learned_of(kind, max_external_drafts=0)
  careless = careless._replace(
    spec=careless.spec._replace(max_external_drafts=K)
  )
  gaps = forms_apart(kind, drafters.fallback(copies(K), careless))
  assert max(max(values) for values in gaps.values()) > 1e-3


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


def test_no_address_of_noise_repeats(record):  # noqa: F811
  drafter, params = learned_kinds.of_table("mtp", (), draft_shape.chain(2), 3)
  for row in range(2):
    table_loop.generate(
      REJECTION,
      drafter,
      rows=slice(row, row + 1),
      index=jnp.array([row]),
      target=learned_kinds.TABLE,
      params=params,
      prompt=table_loop.PROMPT % learned_kinds.TABLE.vocab_size,
    )
  jax.effects_barrier()
  counts = collections.Counter(record)
  assert max(counts.values()) == 1
  streams = {place[0] for _, place in counts}
  assert streams == {noise.DRAFT, noise.ACCEPT, noise.NEXT}


@pytest.mark.parametrize(
  "first, other, sentence",
  [
    (
      lambda: drafters.lookup(6),
      lambda: learned_of("eagle"),
      r"after 5 draft tokens .* lookup drafts 6",
    ),
    (
      lambda: learned_of("eagle"),
      lambda: learned_of("eagle"),
      "must be deterministic",
    ),
    (
      lambda: drafters.lookup(2),
      lambda: learned_of("eagle", draft_shape.static([-1, 0, 0])),
      "takes chains",
    ),
    (
      lambda: drafters.lookup(2),
      lambda: learned_of("recycle"),
      "an early exit cannot be the fallback",
    ),
    (
      lambda: drafters.lookup(2),
      lambda: drafters.model(target()[0], k=2),
      "model cannot be the fallback",
    ),
    (
      lambda: drafters.lookup(shape=draft_length.adaptive(2)),
      lambda: learned_of("eagle", draft_shape.chain(2)),
      "goes with one drafter",
    ),
  ],
)
def test_pairs_that_do_not_fit_are_refused(first, other, sentence):
  with pytest.raises(ValueError, match=sentence):
    drafters.fallback(first(), other())
