"""The suffix array against brute force, and what the drafter makes of it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from planted import broken
from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  drafters,
  sampling,
  step,
)
from specdec.drafters import suffix_index
from specdec.testing import check_drafter
from specdec.testing.drafter_conformance import INVARIANTS
from specdec.types import Params
from text_statistics import SMALLEST_P, p_value
from two_forms import slow

TABLE, TABLES = learned_kinds.TABLE, learned_kinds.TABLES
V = TABLE.vocab_size
REJECTION = (acceptance.rejection(),)
TREE = draft_shape.dynamic(4, 3, 5)


def texts_of(rng, count, vocab_size=V, size=30):
  return [
    rng.integers(0, vocab_size, rng.integers(1, size)).tolist()
    for _ in range(count)
  ]


TEXTS = texts_of(np.random.default_rng(1), 12)
INDEX = jax.tree.map(jnp.asarray, suffix_index.build(TEXTS))
WITH_INDEX = TABLES._replace(draft=INDEX)


def places_of(texts, pattern):
  """What follows each place where a pattern stands in texts."""
  size = len(pattern)
  return [
    tuple(text[i + size :])
    for text in texts
    for i in range(len(text) - size + 1)
    if text[i : i + size] == list(pattern)
  ]


def test_suffixes_are_sorted():
  tokens, order = suffix_index.build(TEXTS)
  assert sorted(order.tolist()) == [*range(len(tokens))]
  suffixes = [tokens[i : i + suffix_index.DEPTH].tolist() for i in order]
  assert suffixes == sorted(suffixes)
  repeated = suffix_index.build([[1] * 300, [1, 2] * 100])
  some = [
    repeated.tokens[i : i + suffix_index.DEPTH].tolist() for i in repeated.order
  ]
  assert some == sorted(some)


def test_ranges_hold_what_begins_with_a_pattern():
  rng = np.random.default_rng(2)
  find = jax.jit(suffix_index.search)
  for _ in range(60):
    length = int(rng.integers(1, 5))
    pattern = rng.integers(0, V, 4)
    low, high = map(int, find(INDEX, jnp.asarray(pattern), length))
    assert high - low == len(places_of(TEXTS, pattern[:length].tolist()))
    for start in np.asarray(INDEX.order)[low:high]:
      found = np.asarray(INDEX.tokens)[start : start + length]
      np.testing.assert_array_equal(found, pattern[:length])


def test_the_longest_match_and_what_followed_it():
  rng, most = np.random.default_rng(3), 6
  for _ in range(40):
    size = int(rng.integers(1, 12))
    row = rng.integers(0, V, 12)
    found = suffix_index.longest_match(INDEX, jnp.asarray(row), size, most)
    lengths = [
      n
      for n in range(1, min(most, size) + 1)
      if places_of(TEXTS, row[size - n : size].tolist())
    ]
    matched = max(lengths, default=0)
    assert int(found[0]) == matched
    if matched:
      after, used = suffix_index.continuations(INDEX, *found, 400, 3)
      ours = sorted(
        tuple(x for x in line if x >= 0)
        for line in np.asarray(after)[np.asarray(used)].tolist()
      )
      pattern = row[size - matched : size].tolist()
      assert ours == sorted(x[:3] for x in places_of(TEXTS, pattern))


def test_shares_of_a_large_range_are_right_to_one_place():
  rng = np.random.default_rng(4)
  texts = texts_of(rng, 60, 3, 60)
  index = jax.tree.map(jnp.asarray, suffix_index.build(texts))
  found = suffix_index.longest_match(index, jnp.array([1]), 1, 1)
  after, used = suffix_index.continuations(index, *found, 32, 3)
  assert np.all(used)
  everything = places_of(texts, [1])
  for depth in (1, 2, 3):
    exact = collections.Counter(x[:depth] for x in everything)
    seen = collections.Counter(
      map(tuple, np.asarray(after)[:, :depth].tolist())
    )
    for text, count in exact.items():
      if len(text) == depth:
        assert abs(count / len(everything) - seen[text] / 32) <= 1 / 32


@pytest.mark.parametrize("make", [suffix_index.build, suffix_index.shapes])
def test_what_is_no_index_is_refused(make, monkeypatch):
  """Its shapes are too, which are asked for before any weights are read."""
  monkeypatch.setattr(suffix_index, "MOST_TOKENS", 4)
  for texts, sentence in (
    ([], "needs a text"),
    ([[], []], "needs a text"),
    ([[1, 2], [3]], "5 tokens are too many .* at most 4"),
  ):
    with pytest.raises(ValueError, match=sentence):
      make(texts)


def draft_of(drafter, text, params=TABLES, size=24):
  """(tokens, parents) of the draft after one text, nodes in use."""
  tokens = np.zeros((1, size), np.int32)
  tokens[0, : len(text)] = text
  state = decode.start(
    TABLE,
    drafter,
    acceptance.coupled(),
    params,
    jnp.asarray(tokens),
    jnp.array([len(text)]),
    jax.random.key(0),
    max_length=size,
    sampling=sampling.settings(1),
  )
  draft, _ = step.draft_step(
    TABLE, drafter, acceptance.coupled(), params, state
  )
  draft = drafter.spec.with_tree(draft)
  count = int(draft.count[0])
  parents = np.broadcast_to(draft.parents, draft.tokens.shape)
  return draft.tokens[0, 1:count].tolist(), parents[0, 1:count].tolist()


def of(texts):
  return TABLES._replace(
    draft=jax.tree.map(jnp.asarray, suffix_index.build(texts))
  )


def test_a_text_is_continued_by_vote():
  drafter = drafters.suffix(4, min_match=1, factor=4.0)
  # 0 stood three times: 1 followed twice, and 2 once, latest. Then one place
  # says 1 and one says 2: the latest of them.
  text = [0, 1, 3, 0, 1, 3, 0, 2, 0]
  assert draft_of(drafter, text) == ([1, 3, 0, 2], [0, 1, 2, 3])
  assert draft_of(drafters.lookup(4, min_ngram=1), text)[0] == [2, 0, 2, 0]
  assert draft_of(drafter, [0, 1, 2, 3]) == ([], [])
  # A text that repeats itself goes on doing so.
  assert draft_of(drafter, [1, 0, 1, 0])[0] == [1, 0, 1, 0]


def test_a_draft_is_as_long_as_its_match_allows_and_probability_lasts():
  corpus = of([[0, 1, 2, 3, 2, 1, 0]])
  for factor, wanted in ((1.0, [2, 3]), (1.5, [2, 3, 2]), (0.4, [])):
    drafter = drafters.suffix(4, corpus=True, factor=factor, min_match=1)
    assert draft_of(drafter, [0, 1], corpus)[0] == wanted
  halves = of([[0, 1, 2, 3], [0, 1, 2, 2], [0, 1, 3, 3]])
  for min_prob, wanted in ((0.3, [2, 2]), (0.5, [2]), (0.7, [])):
    drafter = drafters.suffix(4, corpus=True, min_prob=min_prob)
    assert draft_of(drafter, [0, 1], halves)[0] == wanted
  assert (
    draft_of(drafters.suffix(4, corpus=True, min_match=3), [0, 1], halves)[0]
    == []
  )


def test_the_draft_of_which_more_is_expected_is_taken():
  drafter = drafters.suffix(4, corpus=True, min_match=1)
  text = [0, 1, 2, 3, 1, 2]  # its end stood once before: 3 followed
  assert draft_of(drafter, text, of([[3, 3]]))[0] == [3, 1]
  shorter = of([[2, 0, 0]])  # one token matches: one draft token
  assert draft_of(drafter, text, shorter)[0] == [3, 1]
  longer = of([[3, 1, 2, 0, 0, 0]])  # three tokens match here, two there
  assert draft_of(drafter, text, longer)[0] == [0, 0, 0]


def test_a_tree_holds_what_places_disagree_about():
  corpus = of([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3, 0], [0, 1, 2, 0]])
  drafter = drafters.suffix(shape=TREE, corpus=True)
  tokens, parents = draft_of(drafter, [0, 1], corpus)
  # 2 (3/4), 3 of it (1/2), 3 (1/4), 0 of either (1/4); level by level.
  assert (tokens, parents) == ([2, 3, 3, 0, 0], [0, 0, 1, 1, 2])
  single = drafters.suffix(shape=TREE, corpus=True, children=1)
  assert draft_of(single, [0, 1], corpus) == ([2, 3], [0, 1])


def test_a_copy_under_the_noise_that_wrote_it_is_not_the_targets_text():
  """The uniform draw that refused another token then judges what came in its
  place; under other noise the very same copies are exact."""
  drafter, rule = drafters.suffix(1, corpus=True), REJECTION[0]
  corpora = [suffix_index.build([[0, token]]) for token in range(V)]
  corpora = jax.tree.map(lambda *x: jnp.stack(x), *corpora)

  @jax.jit
  @jax.vmap
  def first_token(key, copied):
    index = jax.tree.map(lambda x: x[copied], corpora)
    parts = TABLE, drafter, rule, TABLES._replace(draft=index)
    prompt, length = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    settings = sampling.settings(1, 1.0)
    state = decode.start(
      *parts, prompt, length, key, max_length=2, sampling=settings
    )
    return decode.run(*parts, state, jnp.array([-1])).tokens[0, 1]

  keys = jax.random.split(jax.random.key(0), 4000)
  others = jax.random.split(jax.random.key(1), 4000)
  wrote = first_token(keys, jnp.zeros(4000, jnp.int32))
  exact = np.asarray(jax.nn.softmax(TABLES.target["table"][V, 0]), float)
  p = [
    p_value(np.asarray(first_token(some, wrote))[:, None], exact)
    for some in (keys, others)
  ]
  assert p[0] < SMALLEST_P < p[1]


@pytest.mark.parametrize(
  "options, words",
  [
    ({"k": 2, "min_match": 0}, "1 <= min_match"),
    ({"k": 2, "max_match": 65}, "<= 64"),
    ({"k": 2, "factor": 0.0}, "factor = 0.0"),
    ({"k": 2, "min_prob": 1.5}, "min_prob = 1.5"),
    ({"k": 2, "children": 0}, "children = 0"),
    ({"k": 2, "max_match": 2.5}, "max_match = 2.5; it must be an integer"),
    ({"k": 65}, "at most 64"),
    ({}, "give one"),
    ({"shape": draft_length.entropy(3)}, "without a distribution"),
    ({"shape": draft_shape.static([-1, 0, 0])}, "trees that the text shapes"),
  ],
)
def test_refusals(options, words):
  with pytest.raises(ValueError, match=words):
    drafters.suffix(**options)


def test_a_corpus_must_be_an_index():
  with pytest.raises(ValueError, match="needs an index of suffixes"):
    draft_of(drafters.suffix(2, corpus=True), [0, 1])


CORPUS = dict(corpus=True, min_match=1, factor=2.0)


@pytest.mark.parametrize(
  "make, params, rules",
  [
    (lambda: drafters.suffix(3, min_match=1), TABLES, REJECTION),
    slow(lambda: drafters.suffix(3, **CORPUS), WITH_INDEX, REJECTION),
    (lambda: drafters.suffix(shape=TREE, **CORPUS), WITH_INDEX, REJECTION),
    slow(lambda: drafters.suffix(0), TABLES, REJECTION),
    slow(lambda: drafters.suffix(3, **CORPUS), WITH_INDEX, None),
    slow(lambda: drafters.suffix(shape=TREE, **CORPUS), WITH_INDEX, None),
  ],
  ids=["text", "corpus", "tree", "nothing", "all rules", "tree, all rules"],
)
def test_conformance(make, params, rules):
  """None: under every rule that fits."""
  stats = check_drafter(make, TABLE, params, rules=rules)
  if make().spec.max_depth:
    assert 0 < stats.accepted.sum() < stats.evaluated.sum()


@pytest.mark.parametrize("shape", [draft_shape.chain(3), slow(TREE)])
def test_no_copy_of_a_cache(shape):
  """Chains have three widths; of a transformer, whose caches are large."""
  target, params = learned_kinds.target()
  index = suffix_index.build(
    texts_of(np.random.default_rng(5), 8, target.vocab_size)
  )
  params = Params(params, jax.tree.map(jnp.asarray, index))
  check_drafter(
    drafters.suffix(shape=shape, **CORPUS),
    target,
    params,
    rules=REJECTION,
    skip={*INVARIANTS} - {"coupled", "copies"},
  )


def proposing(change):
  """A tree of text and corpus, its context changed before it drafts."""
  honest = drafters.suffix(shape=TREE, **CORPUS)

  def propose(params, state, context):
    return honest.propose(params, state, change(context))

  return honest._replace(propose=propose)


def test_planted_a_draft_of_another_row():
  def other(context):
    return context._replace(tokens=jnp.roll(context.tokens, 1, axis=0))

  broken("rows", proposing(other), TABLE, WITH_INDEX)


def test_planted_a_draft_by_the_noise_of_the_text():
  def peek(context):
    token = jnp.argmax(context.noise(1, 1), axis=-1)[:, None]
    last = context.length[:, None] - 2
    column = jnp.arange(context.tokens.shape[1])[None]
    tokens = jnp.where(column == last, token, context.tokens)
    return context._replace(tokens=tokens)

  broken("drawn", proposing(peek), TABLE, WITH_INDEX)
