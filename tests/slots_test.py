"""Rows that arrive and leave: a text is its prompt's, whoever was there before.

Queues are served with fewer rows than prompts; the same prompts in one batch
that nobody leaves say what every text and every count must be.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cache_copies
import learned_kinds
from learned_kinds import small_chunks  # noqa: F401, a fixture
from specdec import (
  acceptance,
  decode,
  draft_length,
  draft_shape,
  draft_tree,
  drafters,
  sampling,
  slots,
)
from specdec.benchmark.batches import Batch
from specdec.benchmark.queues import Request, Server
from specdec.drafters.heads import serve
from specdec.inputs import Inputs
from specdec.types import Params, Skip
from table_loop import MODEL, NEW, PARAMS, SIZE, V, decoder_of, table_decoder
from text_statistics import SMALLEST_P, p_value
from texts import frozen, texts

COUNT = 7
LENGTHS = [1, 5, 2, 4, 5, 3, 1]
COUPLED, REJECTION = acceptance.coupled(), acceptance.rejection()
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2])
CHAINS = draft_shape.static(draft_tree.parallel(2, 2), "iid")
SLOW = pytest.mark.slow


def prompts(vocab_size):
  rows = np.random.default_rng(3).integers(0, vocab_size, (COUNT, SIZE))
  rows[:, 3:] = rows[:, :2]  # something to look up
  return [row[:n].tolist() for row, n in zip(rows, LENGTHS)]


def large_decoder(rule, make, draft=None, name="llama"):
  model, params = learned_kinds.target(name)
  return decoder_of(make(model), rule, model, Params(params, draft))


def head_decoder(rule, kind, shape, copies=0):
  def make(model):
    head = serve.drafter(
      learned_kinds.draft_head(kind), model, shape, None, copies
    )
    copied = drafters.lookup(copies or 1, ngram=2, min_ngram=1)
    return drafters.fallback(copied, head) if copies else head

  return large_decoder(rule, make, learned_kinds.weights(kind))


def skipping(model):
  threshold = drafters.Threshold(0.3)  # which adapts, row by row
  return drafters.layer_skip(model, Skip((1,), (1,)), 3, threshold)


CASES = {
  "baseline": lambda rule: table_decoder(
    decode.NO_DRAFT_RULE, decode.NO_DRAFTER
  ),
  "model": table_decoder,
  "tree": lambda rule: table_decoder(rule, drafters.model(MODEL, shape=TREE)),
  "chains": lambda rule: table_decoder(
    rule, drafters.model(MODEL, shape=CHAINS)
  ),
  "lookup": lambda rule: table_decoder(
    rule, drafters.lookup(3, ngram=2, min_ngram=1)
  ),
  "threshold": lambda rule: large_decoder(rule, skipping),
  "exit": lambda rule: large_decoder(
    rule, lambda model: drafters.early_exit(model, 1, 2)
  ),
  "eagle": lambda rule: head_decoder(rule, "eagle", draft_shape.chain(3)),
  "eagle3 tree": lambda rule: head_decoder(rule, "eagle3", TREE),
  "lookup | eagle": lambda rule: head_decoder(
    rule, "eagle", draft_shape.chain(2), 4
  ),
  "published": lambda rule: head_decoder(
    rule, "published_eagle", draft_shape.chain(2)
  ),
  "encoder-decoder": lambda rule: large_decoder(
    rule, lambda _: drafters.lookup(3, ngram=2, min_ngram=1), name="t5"
  ),
  "encoder-decoder, model": lambda rule: large_decoder(
    rule,
    lambda model: drafters.model(model, 2),
    learned_kinds.target("t5")[1],
    "t5",
  ),
}
DUE = [("model", COUPLED), ("model", REJECTION), ("tree", REJECTION)]
DUE += [("encoder-decoder", REJECTION)]  # check_drafter refills for the others
LATE = [(name, COUPLED) for name in CASES] + [
  (name, REJECTION) for name in CASES if name != "baseline"
]
LATE.append(("chains", acceptance.kseq()))


def requests_of(decoder, new_tokens=None):
  new_tokens = new_tokens or [decoder.max_new_tokens] * COUNT
  some = zip(prompts(decoder.target.vocab_size), new_tokens)
  return [Request(i, ids, 0.0, new) for i, (ids, new) in enumerate(some)]


def together(decoder):
  """All prompts in one batch: texts, and counts."""
  whole = dataclasses.replace(decoder, batch=COUNT)
  batch = Batch(prompts(decoder.target.vocab_size), range(COUNT))
  parts = whole.target, whole.drafter, whole.rule, whole.params
  eos_ids = jnp.asarray(decoder.eos_ids, jnp.int32)
  state = decode.run(*parts, whole.start(batch), eos_ids)
  given = map(whole.num_given, batch.rows)
  every = [text[n:] for text, n in zip(texts(state), given)]
  return every, jax.tree.map(np.asarray, state.stats)


def check(decoder, new_tokens=None, refill=1):
  """Asserts that a queue gets the texts and counts of one batch."""
  served = Server(decoder, refill).serve(requests_of(decoder, new_tokens))
  wanted, stats = together(decoder)
  if new_tokens:
    wanted = [text[:new] for text, new in zip(wanted, new_tokens)]
  assert [one.request.number for one in served.answers] == [*range(COUNT)]
  assert [*map(tuple, served.texts)] == wanted
  for i, one in enumerate(served.answers):
    assert one.stats.emitted[0] == len(one.tokens)
    for name, value in vars(stats).items():
      if name != "widths" and not new_tokens:
        ours = getattr(one.stats, name)[0]
        assert np.array_equal(ours, value[i]), (name, i)
  return served


@pytest.mark.parametrize(
  "name, rule",
  [*DUE, *(pytest.param(*x, marks=SLOW) for x in LATE if x not in DUE)],
  ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_a_queue_gets_the_texts_of_one_batch(name, rule):
  decoder = CASES[name](rule)
  served = check(decoder, refill=2)
  if name != "baseline" and rule is not COUPLED:
    assert served.rounds < sum(map(len, served.texts))
  if rule is COUPLED:  # and of autoregressive decoding of each prompt alone
    alone = dataclasses.replace(decoder.baseline(), batch=1)
    for one in served.answers:
      number = one.request.number
      [text] = alone.complete(Batch([one.request.ids], [number])).texts
      assert one.tokens == text


def deciding(rule):
  """A decoder whose rows draft 0 to 3 tokens, as it pays."""
  shape = draft_length.adaptive(3, [1, 1.65, 2.0, 2.3], 0.01)
  return table_decoder(rule, drafters.model(MODEL, shape=shape))


def counts_of(served):
  """What was drafted and when not: [D] draft tokens, rounds without any."""
  drafted = sum(one.stats.drafted[0] for one in served.answers)
  rounds = sum(one.stats.rounds[0] for one in served.answers)
  return drafted, rounds - drafted[0]


def test_rows_that_decide_for_themselves_come_and_go():
  decoder = deciding(COUPLED)
  served = Server(decoder, 2).serve(requests_of(decoder))
  alone = dataclasses.replace(decoder.baseline(), batch=1)
  for one in served.answers:
    number = one.request.number
    assert (
      one.tokens == alone.complete(Batch([one.request.ids], [number])).texts[0]
    )
  drafted, idle = counts_of(served)
  assert drafted[0] > drafted[1] > 0 and idle > 0


@pytest.mark.slow
def test_texts_of_rows_that_decide_and_come_and_go_have_the_distribution():
  decoder, requests = deciding(REJECTION), 6000
  some = [Request(i, [1, 2], 0.0, 3) for i in range(requests)]
  served = Server(decoder, 2).serve(some)
  table = np.asarray(PARAMS.target["table"], np.float64)
  probs = np.exp(table) / np.exp(table).sum(axis=-1, keepdims=True)
  joint = np.einsum("a,ab,abc->abc", probs[1, 2], probs[2], probs[:V])
  drafted, idle = counts_of(served)
  assert drafted[0] > 0 and idle > 0
  assert p_value(np.array(served.texts), joint) > SMALLEST_P


def test_requests_of_unlike_lengths_get_their_part_of_the_text():
  check(table_decoder(), new_tokens=[9, 1, 4, 1, 2, 7, 3])


@pytest.mark.parametrize("rows, refill", [(1, 1), (3, 3), (7, 4), (9, 2)])
def test_the_number_of_rows_changes_no_text(rows, refill):
  served = check(table_decoder(rows=rows), refill=refill)
  assert served.refills >= -(-COUNT // refill)


def test_an_end_of_text_may_be_the_first_token():
  first = [text[0] for text in together(table_decoder())[0]]
  assert len({*first}) > 1
  served = check(table_decoder(eos_ids=(first[0],) * V))
  assert served.texts[0] == first[:1]
  every = table_decoder(eos_ids=tuple(range(V)))
  assert [len(text) for text in check(every).texts] == [1] * COUNT


def test_filters_and_temperature_are_those_of_a_batch():
  check(table_decoder(top_k=3, top_p=0.9, temperature=0.7))
  check(table_decoder(temperature=0.0))


@pytest.fixture
def refilling(monkeypatch):
  """Patches what a refill is traced with, and nothing else."""
  slots.refill.clear_cache()
  yield monkeypatch.setattr
  slots.refill.clear_cache()


def forgetting(name):
  """`slots.row_axes`, by which leaves of this name stay as they were."""
  honest = slots.row_axes

  def row_axes(whole, *rest):
    paths = [
      jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(whole)
    ]
    assert any(map(name.__eq__, paths)), paths
    axes = honest(whole, *rest)
    return [None if path == name else x for path, x in zip(paths, axes)]

  return row_axes


@pytest.mark.parametrize(
  "leaf",
  [
    ".target_cache.length",
    ".target_cache.layers[0][0]",
    ".stats.rounds",
    ".stats.accepted",
    ".keys",
    ".limit",
    ".done",
  ],
)
def test_planted_something_of_who_was_there_before_is_kept(leaf, refilling):
  """An old length or KV, old counts, an old key: each is noticed."""
  refilling(slots, "row_axes", forgetting(leaf))
  with pytest.raises(AssertionError, match="assert"):
    check(table_decoder())


@pytest.mark.parametrize(
  "leaf",
  [
    ".draft_state.seed",
    pytest.param(".draft_state.cache.length", marks=SLOW),
  ],
)
def test_planted_the_state_of_a_head_is_kept(leaf, refilling):
  refilling(slots, "row_axes", forgetting(leaf))
  with pytest.raises(AssertionError, match="assert"):
    check(CASES["eagle"](REJECTION))


def test_planted_noise_by_slot_is_noticed(refilling):
  decoder, honest = table_decoder(), decode.start
  wanted, _ = together(decoder)

  def start(*args, index=None, **options):
    del index
    return honest(*args, **options)

  refilling(slots.decode, "start", start)
  served = Server(decoder).serve(requests_of(decoder))
  assert [*map(tuple, served.texts)] != wanted


def test_many_refills_are_one_trace():
  drafter, traces = drafters.model(MODEL, 2), []

  def init(*args):
    traces.append(args)
    return drafter.init(*args)

  propose = chex.assert_max_traces(drafter.propose, n=1)
  decoder = table_decoder(drafter=drafter._replace(init=init, propose=propose))
  server = Server(decoder, 2)
  for seed in range(3):  # other prompts, lengths, numbers and pieces
    rng = np.random.default_rng(seed)
    server.serve(
      [
        Request(i, [1] * rng.integers(1, SIZE), 0.0, int(rng.integers(1, NEW)))
        for i in range(seed, seed + 9)
      ]
    )
  assert len(traces) == 2  # of the empty state, and of refills


def arriving(numbers, count, **options):
  """Inputs of R rows for these prompts, and nothing in those after."""
  some = [prompts(V)[i] for i in numbers] + [[0]] * (count - len(numbers))
  tokens = np.zeros((count, SIZE), np.int32)
  for i, ids in enumerate(some):
    tokens[i, : len(ids)] = ids
  index = np.array([*numbers, *[0] * (count - len(numbers))], np.int32)
  given = {
    "prompt": jnp.asarray(tokens),
    "prompt_length": jnp.array([len(ids) for ids in some], jnp.int32),
    "key": jax.random.key(5),
    "sampling": sampling.settings(count, 1.0),
    "index": jnp.asarray(index),
  }
  return Inputs(**given | options)


def started(drafter, inputs, size=14):
  options = inputs._asdict() | {"max_length": size}
  return decode.start(MODEL, drafter, REJECTION, PARAMS, **options)


def refilled(drafter, state, rows, inputs):
  rows = jnp.asarray(rows, jnp.int32)
  parts = MODEL, drafter, REJECTION, PARAMS
  return slots.refill(*parts, state, rows, inputs)


def test_a_refill_writes_all_of_its_rows_and_nothing_else():
  """Every leaf, bit by bit, those included that no text depends on."""
  drafter = drafters.model(MODEL, shape=TREE)
  state = started(drafter, arriving([0, 1, 2, 3], 4))
  state = decode.run(
    MODEL, drafter, REJECTION, PARAMS, state, jnp.array([-1]), 3
  )
  before = frozen(state)
  state = refilled(drafter, state, [2, 0, 4, 1], arriving([5, 6, 4, 3], 4))
  after, fresh = frozen(state), frozen(started(drafter, arriving([5, 6], 2)))
  assert np.array_equal(after.stats.widths, before.stats.widths)
  assert after.stats.widths.sum() == 3
  without = [
    x.replace(stats=x.stats.replace(widths=None))
    for x in (before, after, fresh)
  ]
  before, after, fresh = map(jax.tree.leaves, without)
  for old, ours, new in zip(before, after, fresh):
    assert np.array_equal(ours[[2, 0]], new)
    assert np.array_equal(ours[[1, 3]], old[[1, 3]])


def stateful(init, number):
  """A drafter of one token that carries what `init` makes of a batch."""
  lookup = drafters.lookup(1, min_ngram=0)
  spec = lookup.spec._replace(name=f"carries {number}")

  def propose(params, state, context):
    return lookup.propose(params, None, context)[0], state

  return lookup._replace(
    spec=spec,
    init=lambda params, context, output: init(len(context.length)),
    propose=propose,
    update=lambda params, state, *rest: jax.tree.map(lambda x: x + 1, state),
  )


def test_rows_may_be_any_axis_and_what_is_of_no_row_goes_on():
  drafter = stateful(
    lambda batch: (jnp.zeros((2, batch)), jnp.zeros(()), jnp.zeros(3)), 0
  )
  for count in (1, 3):  # as few, and as many, as there are rows
    state = started(drafter, arriving([0, 1, 2], 3))
    state = decode.run(
      MODEL, drafter, REJECTION, PARAMS, state, jnp.array([-1]), 2
    )
    some = arriving([4], count)
    state = refilled(drafter, state, [1, 3, 3][:count], some)
    by_row, scalar, of_all = state.draft_state
    assert by_row.tolist() == [[2, 0, 2]] * 2
    assert scalar == 2 and of_all.tolist() == [2] * 3


@pytest.mark.parametrize(
  "change, sentence",
  [
    (lambda x: x._replace(index=None), "inputs.index is absent"),
    (
      lambda x: x._replace(sampling=sampling.settings(2, 1.0, top_k=2)),
      "do not hold the same things",
    ),
    (
      lambda x: x._replace(prompt=jnp.zeros((2, 13), jnp.int32)),
      r"state.target_cache.layers\[0\]\[0\] is float32",
    ),
  ],
)
def test_other_inputs_than_the_state_began_with_are_refused(change, sentence):
  drafter = drafters.model(MODEL, 2)
  state = started(drafter, arriving([0, 1, 2], 3), size=13)
  with pytest.raises(ValueError, match=sentence):
    refilled(drafter, state, [0, 1], change(arriving([3, 4], 2)))


def test_a_state_that_is_of_pairs_of_rows_is_refused():
  drafter = stateful(lambda batch: jnp.zeros((batch, batch)), 1)
  state = started(drafter, arriving([0, 1, 2], 3))
  with pytest.raises(ValueError, match=r"state.draft_state is float32\[3, 3\]"):
    refilled(drafter, state, [0], arriving([3], 1))


def test_another_drafter_than_the_state_began_with_is_refused():
  state = started(drafters.model(MODEL, 2), arriving([0, 1, 2], 3))
  with pytest.raises(ValueError, match="take the drafter"):
    refilled(drafters.lookup(2), state, [0], arriving([3], 1))


@pytest.mark.parametrize(
  "name",
  [
    "model",
    *(
      pytest.param(x, marks=SLOW)
      for x in ("baseline", "early exit", "model, dynamic")
    ),
  ],
)
def test_a_refill_copies_no_cache_but_its_rows(name):
  """Anywhere in the program, and not in its loops alone."""
  batch, count = 8, 1
  pair = cache_copies.pairs()[name]
  lowered, (cache, drafter_cache) = cache_copies.lower_refill(
    pair, batch, count
  )
  compiled, buffers = lowered.compile(), cache + drafter_cache
  # The search did see the writes.
  writes = "dynamic-update-slice("
  lines = [x for x in compiled.as_text().splitlines() if writes in x]
  for buffer in buffers:
    shape = ",".join(map(str, buffer.shape))
    assert any(f"[{shape}]" in line for line in lines)
  assert cache_copies.copies_anywhere(compiled.as_text(), buffers) == []
  size, memory = cache_copies.nbytes(buffers), compiled.memory_analysis()
  assert memory.temp_size_in_bytes < 1.2 * size * count / batch
  assert memory.alias_size_in_bytes > size


def test_planted_a_state_that_is_not_given_away_is_copied(monkeypatch):
  kept = jax.jit(
    slots.refill.__wrapped__, static_argnames=("target", "drafter", "rule")
  )
  monkeypatch.setattr(slots, "refill", kept)
  lowered, (cache, _) = cache_copies.lower_refill(
    cache_copies.pairs()["baseline"], 8, 1
  )
  assert cache_copies.copies_anywhere(lowered.compile().as_text(), cache)


def test_a_run_may_stop_at_any_number_of_rows_that_are_done():
  drafter = drafters.lookup(2)
  parts = MODEL, drafter, REJECTION, PARAMS
  limit = jnp.array([6, 14, 9], jnp.int32)
  state = started(drafter, arriving([0, 2, 6], 3, limit=limit))
  run = functools.partial(decode.run, *parts)
  ids = jnp.array([-1])
  for number in (1, 2, 3):
    state = run(state, ids, decode.MAX_ROUNDS, jnp.int32(number))
    assert int(jnp.sum(state.done)) == number
