"""A draft with another tokenizer, on tables of two vocabularies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from planted import broken
from specdec import acceptance, draft_shape, drafters
from specdec.drafters import token_map
from specdec.drafters.token_map import MappedWeights, TokenMap
from specdec.models import transformer
from specdec.models.weight_formats import WeightFormat
from specdec.testing import check_drafter, table_model
from specdec.testing.drafter_conformance import INVARIANTS
from specdec.types import Params
from two_forms import slow

TARGET, DRAFT = table_model.model(4), table_model.model(6)
REJECTION = (acceptance.rejection(),)
CHAIN_RULES = (*REJECTION, acceptance.block(), acceptance.greedy())
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2])
DYNAMIC = draft_shape.dynamic(2, 3, 5)
IID = draft_shape.static([-1, 0, 0, 1, 2], "iid")


def mapped(spelled, to_draft, prefix=()) -> TokenMap:
  """A map of the pieces of every token of the target."""
  start = np.cumsum([0, *map(len, spelled)])
  pieces = [piece for pieces in spelled for piece in pieces]
  arrays = to_draft, start, pieces, prefix, to_draft
  return TokenMap(*(np.array(x, np.int32) for x in arrays))


# Of four tokens the draft has two; one takes it three pieces, one nothing.
PARTED = mapped([[4], [5, 1, 5], [0], []], [4, -1, 0, -1], [3])
ALL_COMMON = mapped([[4], [2], [0], [5]], [4, 2, 0, 5])
LONG = mapped([[4], [5, 1, 5], [0], [1, 2, 3, 1, 2, 3, 5]], [4, -1, 0, -1])
# A text may begin with tokens of which the draft's text has nothing.
NO_PREFIX = mapped([[], [5, 1], [0], [2]], [-1, -1, 0, 2])
MAPS = {
  "parted": PARTED,
  "all common": ALL_COMMON,
  "long": LONG,
  "no prefix": NO_PREFIX,
}


def params(table: TokenMap) -> Params:
  """Weights of target and draft, the draft fond of what both have."""
  ours, theirs = jax.random.split(jax.random.key(3))
  draft = table_model.init_params(theirs, 6, 1.5)
  weights = MappedWeights(draft, jax.tree.map(jnp.asarray, table))
  return Params(table_model.init_params(ours, 4), weights)


@pytest.mark.parametrize(
  "name, options, rules",
  [
    ("parted", {"k": 3}, REJECTION),
    slow("parted", {"k": 3}, CHAIN_RULES),
    slow("long", {"k": 2, "room": 4}, REJECTION),
    slow("no prefix", {"shape": TREE}, REJECTION),
    slow("all common", {"k": 3}, CHAIN_RULES),
    slow("parted", {"k": 1}, CHAIN_RULES),
    slow("parted", {"shape": TREE}, REJECTION),
    slow("parted", {"shape": DYNAMIC}, REJECTION),
    slow("parted", {"shape": IID}, (*REJECTION, acceptance.kseq())),
    slow("long", {"k": 3, "room": 1}, CHAIN_RULES),
    slow("no prefix", {"k": 3}, CHAIN_RULES),
    slow("no prefix", {"k": 0}, REJECTION),
  ],
)
def test_every_invariant(name, options, rules):
  """Exact by enumeration; coupled and greedy text is autoregressive text."""
  stats = check_drafter(
    lambda: drafters.translated(DRAFT, **options),
    TARGET,
    params(MAPS[name]),
    rules=rules,
  )
  if options != {"k": 0}:
    assert 0 < stats.accepted.sum() < stats.evaluated.sum()


V = learned_kinds.V
# All but four tokens are common; those take two or three pieces, or none.
TRANSFORMER_MAP = mapped(
  [[20], [18, 3], *([2 * i] for i in range(2, 9)), [5, 7, 9], [],
   [1, 1, 11], *([i] for i in range(12, 17))],
  [20, -1, *(2 * i for i in range(2, 9)), -1, -1, -1, *range(12, 17)],
  [22],
)  # fmt: skip


def transformers(table: TokenMap):
  """(target, draft, params): the draft often agrees, in ids of its own."""
  config = learned_kinds.TARGET
  other = dataclasses.replace(config, vocab_size=23)
  ours, theirs = (
    jax.tree.map(lambda x: 3 * x, transformer.init_params(one, key))
    for one, key in zip((config, other), jax.random.split(jax.random.key(0)))
  )
  common = np.flatnonzero(table.to_draft >= 0)
  ids = table.to_draft[common]

  def near(path, x, y):
    """A weight of the target, or rows of a table of tokens, and a little y."""
    if path[0].key in ("embed", "head"):
      return (0.3 * y).at[ids].add(x[common])
    return x + 0.3 * y

  draft = jax.tree_util.tree_map_with_path(near, ours, theirs)
  weights = MappedWeights(draft, jax.tree.map(jnp.asarray, table))
  models = transformer.model(config), transformer.model(other)
  return *models, Params(ours, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
  "options", [{"k": 3}, {"shape": TREE}, {"shape": DYNAMIC}]
)
def test_transformers(options):
  """No cache is copied, and KV is that of the text, layer by layer."""
  target, draft, weights = transformers(TRANSFORMER_MAP)
  stats = check_drafter(
    lambda: drafters.translated(draft, **options),
    target,
    weights,
    rules=REJECTION,
  )
  assert 0 < stats.accepted.sum() < stats.evaluated.sum()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_the_order_of_the_target(tied):
  """Logits are those that would have been moved, of fewer rows."""
  config = dataclasses.replace(
    learned_kinds.GEMMA, vocab_size=23, tied=tied, scale_logits=True
  )
  params = transformer.init_params(config, jax.random.key(0))
  table = jax.tree.map(jnp.asarray, TRANSFORMER_MAP)
  tokens = jnp.array([[0, 2, 16], [13, 4, 4]])
  other, weights, ordered = token_map.in_order(config, params, table)
  assert weights["head"]["weight"].shape == (V, config.width)
  assert ordered.column is None and table.column is not None
  whole, part = (
    token_map.model_of(transformer.model(c), t).apply(p, tokens, None)[0].logits
    for c, p, t in ((config, params, table), (other, weights, ordered))
  )
  np.testing.assert_allclose(whole, part, rtol=1e-5, atol=1e-8)
  assert np.all(np.isinf(whole) == (TRANSFORMER_MAP.to_draft < 0))
  shapes = jax.eval_shape(lambda: (params, table))
  abstract = token_map.in_order(config, *shapes)
  assert jax.tree.structure(abstract[1:]) == jax.tree.structure(
    (weights, ordered)
  )
  same = dataclasses.replace(config, vocab_size=V)
  integers = dataclasses.replace(config, weights=WeightFormat("int8"))
  for kept in (same, integers):
    assert token_map.in_order(kept, params, table)[2] is table


def test_a_row_without_room_is_not_drafted_for():
  """Some rows of one batch are, others are not; the text is the same."""
  stats = check_drafter(
    lambda: drafters.translated(DRAFT, 3, room=1),
    TARGET,
    params(LONG),
    rules=(),
    skip={*INVARIANTS} - {"coupled", "state"},
  )
  assert np.any(stats.rounds > stats.drafted[:, 0] + 1)


def test_the_text_is_spelled_in_the_tokens_of_the_draft():
  """Prompts of any length at once, and what a round adds to them."""
  table = jax.tree.map(jnp.asarray, PARTED)
  tokens = jnp.array([[0, 1, 2, 3, 1], [3, 3, 3, 3, 3], [2, 0, 0, 0, 0]])

  class Committed:
    def __init__(self, length):
      self.tokens, self.length = tokens, jnp.array(length)

  wanted = [[3, 4, 5, 1, 5, 0, 5, 1, 5], [3], [3, 0, 4, 4]]
  for chunk in (1, 2, 5, 7):
    text = token_map.empty(table, 3, 11)
    for length in ([1, 1, 1], [2, 3, 3], [5, 5, 3]):
      text = token_map.read(text, table, Committed(length), chunk)
    rows = zip(text.tokens.tolist(), text.length.tolist())
    assert [row[:length] for row, length in rows] == wanted
    assert text.num_read.tolist() == [5, 5, 3]
  assert text.drafts.tolist() == [True] * 3
  short = token_map.read(
    token_map.empty(table, 3, 4), table, Committed([5, 5, 3]), 2
  )
  assert short.tokens.tolist()[0] == wanted[0][:4]
  assert short.length.tolist() == text.length.tolist()
  assert short.drafts.tolist() == [False, True, True]
  assert short.end.tolist() == [4, 1, 4]
  start, committed = token_map.empty(table, 3, 11), Committed([5, 5, 3])
  with jax.enable_x64(True):  # counts keep the 32 bits that a loop carries
    long = token_map.read(start, table, committed, 2)
  assert {x.dtype for x in (long.tokens, long.length, long.num_read)} == {
    jnp.dtype("int32")
  }
  assert long.tokens.tolist() == text.tokens.tolist()


def test_options_that_are_refused():
  with pytest.raises(ValueError, match="room = 0; it must be an integer >= 1"):
    drafters.translated(DRAFT, 3, room=0)
  with pytest.raises(ValueError, match="k = None and shape absent"):
    drafters.translated(DRAFT)
  reads = DRAFT._replace(encode=lambda params, source: None)
  with pytest.raises(ValueError, match="it must be a decoder"):
    drafters.translated(reads, 3)


# Planted bugs: the invariant that breaks is named.


def with_log_probs(change):
  """The drafter, what it hands over changed."""
  honest = drafters.translated(DRAFT, 3)

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    return draft._replace(log_probs=change(draft.log_probs)), state

  return honest._replace(propose=propose)


def test_a_masked_distribution_that_is_not_renormalised():
  """As the draft has it over all of its tokens."""
  drafter = with_log_probs(lambda log_probs: log_probs + jnp.log(0.6))
  broken("drawn", drafter, TARGET, params(PARTED), "adds up to")
  broken("distribution", drafter, TARGET, params(PARTED))


@pytest.mark.parametrize("invariant", ["drawn", slow("distribution")])
def test_a_mask_that_is_forgotten_in_drawing(invariant, monkeypatch):
  """Tokens that only the target has are drawn, and called impossible."""
  honest = token_map.spread
  monkeypatch.setattr(
    token_map,
    "spread",
    lambda logits, table: jnp.maximum(
      honest(logits, table), jnp.min(logits, axis=-1, keepdims=True)
    ),
  )
  unmasked = drafters.translated.__wrapped__(DRAFT, 3)

  def propose(params, state, context):
    draft, state = unmasked.propose(params, state, context)
    common = params.draft.token_map.to_draft >= 0
    log_probs = jnp.where(common, draft.log_probs, -jnp.inf)
    log_probs = jax.nn.log_softmax(log_probs)
    return draft._replace(log_probs=log_probs), state

  drafter = unmasked._replace(propose=propose)
  broken(invariant, drafter, TARGET, params(PARTED))


def test_spelling_that_is_off_by_one_piece():
  """Then KV of what was accepted is not KV of the text."""
  start = PARTED.start.copy()
  start[1:-1] += 1
  wrong = params(PARTED._replace(start=start))
  broken("state", lambda: drafters.translated(DRAFT, 3), TARGET, wrong)


@pytest.mark.slow
def test_an_accepted_token_that_the_draft_lacks(monkeypatch):
  """A tree may draw one where nothing else is left: its KV is not kept."""
  shape = draft_shape.static([-1, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5])
  few = np.where(np.arange(V) < 3, TRANSFORMER_MAP.to_draft, -1)
  target, draft, weights = transformers(TRANSFORMER_MAP._replace(to_draft=few))

  def check(drafter):
    skip = {*INVARIANTS} - {"state"}
    check_drafter(drafter, target, weights, rules=(), skip=skip)

  check(drafters.translated(draft, shape=shape))
  monkeypatch.setattr(
    token_map, "num_kept", lambda table, tokens, accepted: accepted
  )
  with pytest.raises(AssertionError, match="breaks 'state'"):
    check(drafters.translated.__wrapped__(draft, shape=shape))


def test_a_last_token_of_several_pieces_that_is_not_caught_up(monkeypatch):
  honest = token_map.read

  def late(text, table, context, chunk):
    """Moves on by a token for each token of the target."""
    before = text.length
    text = honest(text, table, context, chunk)
    return text._replace(length=jnp.minimum(text.length, before + chunk))

  monkeypatch.setattr(token_map, "read", late)
  drafter = drafters.translated.__wrapped__(DRAFT, 3)
  broken("state", drafter, TARGET, params(PARTED))
