"""Block drafters: every switch, from random weights.

That they are right is that a round drafts slot by slot what training computes
at the same anchor, for every switch, and that the conformance kit finds
nothing.
"""

import dataclasses
import heapq
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import block_plants
import learned_kinds
from learned_kinds import (
  BATCH,
  BLOCKS,
  TARGET,
  K,
  L,
  V,
  draft_head,
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
  draft_tree,
  drafters,
  sampling,
  step,
)
from specdec.drafters.heads import block, block_serve, block_unroll
from specdec.drafters.heads import cost as head_cost
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.block_config import BlockConfig
from specdec.models import transformer
from specdec.roofline import chips, shapes
from specdec.roofline.cost import Deployment
from specdec.roofline.round_cost import round_cost
from specdec.testing import check_drafter
from specdec.testing.drafter_conformance import INVARIANTS
from specdec.types import ModelOutput, Params
from two_forms import (
  CHAIN,
  REJECTION,
  TREE,
  check_apart,
  check_equal,
  check_of_a_transformer,
  drafter_of,
  forms_apart,
  slow,
)

DYNAMIC = draft_shape.dynamic(2, 3, 5)
SURE = draft_length.adaptive(2, [1.0, 1.5, 2.0])
TINY = Deployment(shapes.of_config(TARGET), chips.get("v5e"))
SLOW = pytest.mark.slow
QUICK = "dflash", "dspark", "windowed", "domino", "dflash2"


@pytest.mark.parametrize(
  "kind",
  [x if x in QUICK else slow(x) for x in BLOCKS],
)
def test_b21_a_chain_is_drafted_by_the_distributions_it_is_trained_on(kind):
  check_equal(forms_apart(kind, drafter_of(kind)))


@pytest.mark.parametrize(
  "kind, ids, shape, rules",
  [
    ("dflash", (), CHAIN, (REJECTION, acceptance.block())),
    ("dflash2", (), CHAIN, (REJECTION, acceptance.block())),
    slow("dflash2", (0, 1, 3), draft_shape.static([-1, 0, 0]), (REJECTION,)),
    slow("dflash2", (), CHAIN, None),
    slow("dspark", (), draft_shape.static([-1, 0, 0, 1, 1]), (REJECTION,)),
    slow("dspark", (), CHAIN, None),
    slow("rnn", (0, 2), CHAIN, (REJECTION, acceptance.block())),
    slow("domino", (), draft_shape.static([-1, 0, 0, 1, 1]), (REJECTION,)),
    slow("jetspec", (1, 2), CHAIN, (REJECTION, acceptance.block())),
    slow("gated", (), draft_shape.chain(2), (REJECTION, acceptance.block())),
  ],
)
def test_by_enumeration(kind, ids, shape, rules):
  drafter, params = learned_kinds.of_table(kind, ids, shape)
  check_drafter(drafter, learned_kinds.TABLE, params, rules=rules)


@pytest.mark.parametrize(
  "kind, shape",
  [
    ("rnn", TREE),
    slow("dflash2", CHAIN),
    slow("dflash2", TREE),
    slow("dflash2", DYNAMIC),
    slow("dflash", CHAIN),
    slow("dflash", TREE),
    slow("windowed", CHAIN),
    slow("windowed", DYNAMIC),
    slow("published_block", CHAIN),
    slow("published_block", TREE),
    slow("jetspec", TREE),
    slow("dspark", CHAIN),
    slow("domino", TREE),
    slow("dflash", draft_shape.chain(0)),
    slow("jetspec", draft_shape.chain(1)),
    slow("gated", draft_shape.static(draft_tree.parallel(2, 2), "iid")),
    slow("jetspec", DYNAMIC),
    slow("domino", CHAIN),
  ],
)
def test_of_a_transformer(kind, shape):
  check_of_a_transformer(kind, shape)


def proposed(drafter, kind, state):
  """The draft of a round."""
  params = Params(target()[1], weights(kind))

  @jax.jit
  def propose(params, state):
    context = step.context_of(state, V, REJECTION)
    draft, _ = drafter.propose(params, state.draft_state, context)
    return drafter.spec.with_tree(draft)

  draft = jax.tree.map(np.asarray, propose(params, state))
  parents = np.broadcast_to(draft.parents, draft.tokens.shape)
  return draft._replace(parents=parents)


@pytest.mark.parametrize(
  "kind", ["rnn", *(slow(x) for x in BLOCKS if x != "rnn")]
)
def test_b21_so_is_a_tree_in_the_middle_of_a_text(kind):
  """Every node's text is taught from the round's anchor."""
  drafter = drafter_of(kind, TREE)
  state = speculate(drafter, REJECTION, weights(kind), np.ones(BATCH), most=4)
  tokens, parents, log_probs, *_ = proposed(drafter, kind, state)
  length = np.asarray(state.length)
  lines = np.zeros((BATCH, tokens.shape[1], L + K), np.int32)
  depth = draft_tree.depth(parents[0])
  for b, n in np.ndindex(*tokens.shape):
    lines[b, n, : length[b]] = state.tokens[b, : length[b]]
    node = n
    while node:
      lines[b, n, length[b] - 1 + depth[node]] = tokens[b, node]
      node = parents[b, node]
  taught = learned_kinds.teacher(kind)(lines.reshape(-1, L + K), weights(kind))
  taught = np.asarray(taught).reshape(K, *lines.shape, V)
  checked = 0
  for b, n in np.ndindex(*tokens.shape):
    children = np.flatnonzero(parents[b] == n)
    if len(children):
      expected = taught[depth[n], b, n, length[b] - 1 + depth[n]]
      np.testing.assert_allclose(log_probs[b, children[0]], expected, atol=1e-5)
      checked += 1
  assert checked == BATCH * len(set(parents[0])) - BATCH  # but the root's -1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rnn", slow("dspark")])
def test_a_block_is_as_sure_of_its_tokens_as_it_is_taught(kind):
  """In the middle of a text, of all levels, by its confidence head."""
  shape = draft_length.adaptive(K, [1.0] * (K + 1))  # every level pays
  drafter, head = drafter_of(kind, shape), draft_head(kind)
  state = speculate(drafter, REJECTION, weights(kind), np.ones(BATCH), most=4)
  draft = proposed(drafter, kind, state)
  anchors = np.asarray(state.length)[:, None] - 1
  text = np.zeros((BATCH, L + K + 1), np.int32)
  text[:, :L] = state.tokens
  np.put_along_axis(text, anchors + np.arange(K + 1), draft.tokens, axis=1)
  model, params = target()
  output, _ = model.apply(params, text, None, features=head.features)
  net = weights(kind)["net"]
  unrolled = block_unroll.unroll(
    head,
    net,
    draft_heads.target_weights_of(Params(params, weights(kind))),
    jnp.asarray(text),
    block_unroll.context_of(head, net, output),
    jnp.asarray(anchors),
  )
  probability = jax.nn.sigmoid(unrolled.confidence[:, 0])  # [B, K]
  expected = np.stack([shape.policy.classify(x) for x in probability.T], axis=1)
  used = np.arange(1, K + 1) < draft.count[:, None]  # hopeless rows stop
  assert used.mean() > 0.9 and len(np.unique(expected[used])) > 1
  np.testing.assert_array_equal(draft.certainty[:, 1:][used], expected[used])


@pytest.mark.parametrize("kind", ["dspark", "rnn"])
def test_a_block_in_bfloat16_traces_a_decided_length(kind):
  """Traced alone: what a loop carries must keep its type."""
  config = dataclasses.replace(TARGET, dtype="bfloat16")
  model, head = transformer.model(config), draft_head(kind, config=config)
  nets = weights(kind)["net"], target()[1]

  def counts():
    net, ours = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nets)
    params = Params(ours, draft_heads.weights_of(head, net, ours))
    drafter = drafters.from_head(head, model, SURE)
    parts = model, drafter, REJECTION, params
    state = decode.start(
      *parts,
      jnp.zeros((BATCH, 1), jnp.int32),
      jnp.ones(BATCH, jnp.int32),
      jax.random.key(0),
      max_length=L,
      sampling=sampling.settings(BATCH, 1.0),
    )
    return decode.run(*parts, state, jnp.array([-1])).stats.drafted

  assert jax.eval_shape(counts).shape == (BATCH, 2)


def best_first(log_probs, size):
  """DDTree's heap (arXiv:2604.12989): the `size` likeliest texts, of slots
  [D, V] that know nothing of each other, as {path of tokens}."""
  order = np.argsort(-log_probs, axis=1, kind="stable")
  ranked = np.take_along_axis(log_probs, order, axis=1)
  heap, chosen = [(-ranked[0, 0], (0,))], set()
  while len(chosen) < size:
    cost, ranks = heapq.heappop(heap)
    chosen.add(tuple(order[d, rank] for d, rank in enumerate(ranks)))
    depth, rank = len(ranks) - 1, ranks[-1]
    if rank + 1 < ranked.shape[1]:
      sibling = cost + ranked[depth, rank] - ranked[depth, rank + 1]
      heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1)))
    if depth + 1 < len(ranked):
      heapq.heappush(heap, (cost - ranked[depth + 1, 0], (*ranks, 0)))
  return chosen


@pytest.mark.parametrize(
  "size, depth, vocab_size",
  [slow(1, 4, 16), slow(5, 4, 16), (12, 4, 16), (128, 15, 300)],
)
def test_a_dynamic_tree_as_wide_as_it_is_large_is_ddtrees(
  size, depth, vocab_size
):
  """`dynamic(SIZE, top=SIZE)` of a block: the best product tree, in jit."""
  batch = 5
  rng = np.random.default_rng(size)
  logits = 2 * rng.normal(size=(batch, depth, vocab_size)).astype(np.float32)
  shape = draft_shape.dynamic(size, depth, size)
  pending = jnp.zeros((batch, 1), jnp.int32)
  context = types.SimpleNamespace(
    pending=pending, length=jnp.ones((batch,), jnp.int32)
  )

  def run(level, tokens, parents, first, need_logits):
    return level + 1, jnp.asarray(logits[:, level])[:, None]

  @jax.jit
  def sample():
    tree, _ = shape.sample_tree(context, jnp.asarray(logits[:, 0]), run, 1)
    return tree.draft.tokens, tree.draft.parents

  tokens, parents = map(np.asarray, sample())
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  for row in range(batch):
    paths = [()]
    for node in range(1, size + 1):
      paths.append((*paths[parents[row, node]], tokens[row, node]))
    assert {*paths[1:]} == best_first(log_probs[row], size)


# Mistakes that the two forms, or the conformance kit, must see.


def its_own_position(kind, patch):
  block_plants.train_its_own_position(patch)
  return drafter_of.__wrapped__(kind)


def a_position_too_far(kind, patch):
  """A block that stands one position after its anchor."""
  honest = block_serve.block_view

  def view(*args):
    seen = honest(*args)
    return seen._replace(depth=seen.depth + 1)

  patch.setattr(block_serve, "block_view", view)
  return drafter_of.__wrapped__(kind)


def a_slot_too_far(kind, patch):
  """A draft token that is read off the next slot."""
  head = draft_head(kind)

  def draft(*args):
    hidden, layers = head.draft(*args)
    return jnp.roll(hidden, -1, axis=2), layers

  wrong = head._replace(draft=draft)
  return block_serve.drafter.__wrapped__(wrong, target()[0], CHAIN)


def causal_after_all(kind, patch):
  """A mask inside the block that training does not have."""
  head = draft_head(kind)
  wrong = head._replace(head_config=block_plants.other_mask(head.head_config))
  return block_serve.drafter.__wrapped__(wrong, target()[0], CHAIN)


def left_in_the_cache(kind, patch):
  return block_plants.served_left_in_the_cache(drafter_of(kind))


def no_context(kind, patch):
  return block_plants.served_without_context(drafter_of(kind))


def a_shift_across_blocks(kind, patch):
  """Convolutions that reach into the block before, in training."""
  honest = block.Convolution.__call__

  def convolved(self, x, slots):
    return honest(self, x, x.shape[1])

  patch.setattr(block.Convolution, "__call__", convolved)
  return drafter_of.__wrapped__(kind)


@pytest.mark.parametrize(
  "kind, plant",
  [
    ("dflash2", a_shift_across_blocks),
    ("dflash", its_own_position),
    ("dflash", left_in_the_cache),
    slow("dflash", a_position_too_far),
    slow("dspark", a_slot_too_far),
    slow("dflash", causal_after_all),
    slow("dflash", no_context),
    slow("windowed", its_own_position),
    slow("dspark", left_in_the_cache),
  ],
)
def test_b21_a_plant_shows_that_training_and_drafting_differ(
  kind, plant, monkeypatch
):
  learned_kinds.teacher.cache_clear()
  try:
    gaps = forms_apart(kind, plant(kind, monkeypatch))
  finally:
    learned_kinds.teacher.cache_clear()
  check_apart(gaps)


def broken(invariant, drafter, params):
  with pytest.raises(AssertionError, match=f"breaks '{invariant}'"):
    check_drafter(
      drafter,
      learned_kinds.TABLE,
      params,
      rules=(REJECTION,),
      skip={*INVARIANTS} - {invariant},
    )


def test_the_kit_sees_a_distribution_without_the_successors_part():
  honest, params = learned_kinds.of_table("dspark", (), CHAIN)

  def propose(params, state, context):
    draft, state = honest.propose(params, state, context)
    second = params.draft["net"]["successor"]["second"]
    net = params.draft["net"] | {
      "successor": params.draft["net"]["successor"]
      | {"second": jax.tree.map(jnp.zeros_like, second)}
    }
    without = params._replace(draft=params.draft | {"net": net})
    base, _ = honest.propose(without, state, context)
    return draft._replace(log_probs=base.log_probs), state

  broken("drawn", honest._replace(propose=propose), params)


def test_the_kit_sees_a_distribution_that_is_no_selectors():
  """The slot's whole distribution, instead of the candidates'."""
  honest, params = learned_kinds.of_table("dflash2", (), CHAIN)
  head = learned_kinds.table_head("dflash2")

  def without(*args):
    return args[2], args[-2]

  whole = drafters.from_head(
    head._replace(offer=lambda weights, logits: logits, step=without),
    learned_kinds.STREAMS,
    CHAIN,
  )

  def propose(params, state, context):
    draft, after = honest.propose(params, state, context)
    base, _ = whole.propose(params, state, context)
    return draft._replace(log_probs=base.log_probs), after

  broken("drawn", honest._replace(propose=propose), params)


def test_a_selectors_support_is_its_candidates():
  """And its probabilities are of their scores, written out."""
  head, draft = draft_head("dflash2"), weights("dflash2")
  rng = np.random.default_rng(0)
  hidden, logits = rng.normal(size=(2, 4, 16)), rng.normal(size=(2, 4, 11))
  tokens = rng.integers(0, V, (2, 4))
  offered = head.offer(draft["net"], jnp.asarray(logits, jnp.float32))
  _, given = head.step(
    draft["net"],
    None,
    (),
    jnp.asarray(tokens),
    jnp.asarray(hidden, jnp.float32),
    offered,
    0,
  )
  net = jax.tree.map(lambda x: np.asarray(x, float), draft["net"]["successor"])
  first, second, narrow = (
    net[x]["weight"] for x in ("first", "second", "narrow")
  )
  scores = logits + (first[tokens] * (hidden @ narrow.T)) @ second.T
  chosen = np.argsort(-logits, axis=-1)[..., :3]
  kept = np.zeros(logits.shape, bool)
  np.put_along_axis(kept, chosen, True, -1)
  given = np.asarray(given)
  np.testing.assert_array_equal(np.isfinite(given), kept)
  np.testing.assert_allclose(given[kept], scores[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["dflash", "published_block"])
def test_streams_become_context_by_hand(kind):
  """Normed each in the compact layout, as they are in the published one."""
  head = draft_head(kind)
  net = learned_kinds.sharpened(head.init(jax.random.key(1)), 4)
  net = jax.tree.map(np.asarray, net)
  rng = np.random.default_rng(0)
  streams = [
    rng.normal(size=(2, 3, TARGET.width)).astype(np.float32) * (i + 1)
    for i in range(len(head.features))
  ]
  epsilon = head.head_config.norm_epsilon

  def norm(x, scale):
    return scale * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon)

  named = [x for x in net if x.startswith("stream_norms")]
  assert len(named) == (len(streams) if kind == "dflash" else 0)
  x = streams
  if named:
    x = [norm(x, net[f"stream_norms_{i}"]["scale"]) for i, x in enumerate(x)]
  x = np.concatenate(x, axis=-1) @ net["gather"]["weight"].T
  x = norm(x, net["context_norm"]["scale"])
  output = ModelOutput(None, None, tuple(map(jnp.asarray, streams)))
  np.testing.assert_allclose(head.encode(net, output), x, rtol=1e-4, atol=1e-5)


def test_a_convolution_by_hand():
  taps, group, slots, width = 2, 4, 3, 8
  module = block.Convolution(taps, group)
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 2, 2 * slots, width)).astype(np.float32)
  base = rng.normal(size=(2, taps, width)).astype(np.float32)
  dynamic = rng.normal(size=(2 * taps * width // group, width))
  dynamic = dynamic.astype(np.float32)
  params = {"base": base, "dynamic": {"weight": dynamic}}

  @jax.jit
  def both(x, y):
    before, behind = module.apply({"params": params}, x, slots)
    return before, behind(y)

  ours = both(x, y)
  kernels = (x @ dynamic.T).reshape(2, 2 * slots, 2, taps, width // group)
  for side, (given, result) in enumerate(zip((x, y), ours)):
    for b, s, c in np.ndindex(*x.shape):
      total = sum(
        given[b, s - tap, c]
        * (base[side, tap, c] + kernels[b, s, side, tap, c // group])
        for tap in range(taps)
        if s % slots >= tap
      )
      np.testing.assert_allclose(result[b, s, c], total, rtol=1e-4, atol=1e-4)


def test_dflash2_begins_as_dflash():
  """But for the selector: its convolutions change no bit."""
  plain = draft_head("dflash")
  options = dataclasses.replace(plain.head_config.block, taps=2, group=4)
  convolved = draft_head("dflash", block=options)
  net, other = (x.init(jax.random.key(1)) for x in (convolved, plain))
  model, params = target()
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 12)))
  output, _ = model.apply(params, tokens, None, features=plain.features)
  shared = other | {
    name: net[name] | layer
    for name, layer in other.items()
    if name.startswith("layer")
  }
  draft = learned_kinds.draft_heads.weights_of(plain, other, params)
  rows = learned_kinds.draft_heads.target_weights_of(Params(params, draft))

  def drafted(head, net):
    @jax.jit
    def run(net):
      logits = learned_kinds.every_block(head, net, rows, tokens, output)
      return jnp.stack(logits)

    return run(net)

  assert len(jax.tree.leaves(shared)) == len(jax.tree.leaves(other)) + 8
  np.testing.assert_array_equal(
    drafted(convolved, shared), drafted(plain, other)
  )


def test_the_kit_sees_a_block_left_in_the_cache():
  honest, params = learned_kinds.of_table("dflash", (), CHAIN)
  wrong = block_plants.served_left_in_the_cache(honest)
  broken("state", wrong, params)


@SLOW
def test_fallback():
  """Behind copies, whose rounds leave nothing to catch up with."""
  head, (model, params) = draft_head("dspark", True), target()
  behind = drafters.from_head(head, model, CHAIN, max_external_drafts=5)
  first = drafters.lookup(5, ngram=2, min_ngram=1)
  check_drafter(
    drafters.fallback(first, behind),
    model,
    Params(params, weights("dspark", True)),
    rules=(REJECTION,),
    skip={"distribution"},
  )


@pytest.mark.parametrize(
  "changes, complaint",
  [
    (dict(slots="middle"), "block.slots 'middle' is unknown; known: in_place"),
    (dict(successor="gpt"), "block.successor 'gpt' is unknown; known: none, m"),
    (dict(rank=0), "block.rank = 0; it must be >= 1"),
    (dict(window=-1), "block.window = -1; it must be >= 0"),
    (dict(causal=1), "block.causal = 1; it must be of type bool"),
    (dict(candidates=0), "block.candidates = 0; it must be >= 1"),
    (dict(taps=2, group=5), "block.group = 5 does not divide width = 16"),
    (dict(mask_token=V), "block.mask_token = 17; the target has 17 tokens"),
    (dict(full_layers=(0,)), "block.causal_window = False need a block.window"),
    (dict(causal_window=True), "need a block.window above 0"),
    (dict(full_layers=(2,), window=4), r"= \(2,\); its layers are 0..1"),
    (dict(full_layers=1, window=4), "full_layers = 1; it must be of type tup"),
  ],
)
def test_configs_refuse(changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    draft_head("dflash", block=BlockConfig(**changes))


def test_a_block_is_of_block_drafters_and_no_deeper_than_its_slots():
  with pytest.raises(ValueError, match="belongs to a block drafter, not to mt"):
    learned_kinds.head_config("mtp", block=BlockConfig())
  with pytest.raises(ValueError, match="this block has slots for 3"):
    drafter_of("dflash", draft_shape.chain(4))


def test_only_a_causal_block_is_cut():
  assert draft_head("dflash").num_slots(1) == 1 + K
  assert draft_head("jetspec").num_slots(1) == 2
  assert draft_head("dspark").num_slots(1) == K
  block = BlockConfig(window=3, causal_window=True)  # causal in every layer
  config = learned_kinds.head_config("windowed", block=block)
  head = drafters.LEARNED["block"](config, TARGET, learned_kinds.IDS)
  assert head.num_slots(1) == 2


def test_cost_is_of_one_pass_and_of_small_steps():
  head = draft_head("dspark", full=True)
  cost = head_cost.drafter_cost(head, TARGET)
  net = jax.eval_shape(head.init, jax.random.key(0))
  every = sum(x.size for x in jax.tree.leaves(net))
  assert cost.weight_bytes == 4 * every
  config, rank = head.head_config, head.head_config.block.rank
  second, sure = V * rank, config.width + rank + 1  # what a draft token reads
  assert (cost.level.split_bytes, cost.level.bytes) == (4 * second, 4 * sure)
  encoder = 2 * TARGET.width * (config.width + 1) + config.width
  stored = encoder + 2 * config.width * config.head_dim
  assert cost.update.bytes == 4 * stored
  assert cost.update.written_bytes == cost.position_bytes
  # Keys and values of the block are projected as the context's are.
  own = V * config.width
  assert cost.step.split_bytes == 4 * own
  held = every - own - encoder - V * rank - second - sure
  assert cost.step.bytes == 4 * held
  few = head_cost.drafter_cost(draft_head("dspark"), TARGET)
  fewer = len(learned_kinds.IDS)
  assert few.step.split_bytes == 4 * fewer * config.width
  assert few.level.split_bytes == 4 * fewer * rank
  assert (few.step.bytes, few.level.bytes) == (4 * held, 4 * sure)
  for dtype in ("float32", "bfloat16"):  # KV is of the target's
    config = dataclasses.replace(TARGET, dtype=dtype)
    head = draft_head("dspark", full=True, config=config)
    cache = head.init_cache(2, 5)
    kept = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    same = head_cost.drafter_cost(head, config)
    assert 2 * 5 * same.position_bytes == kept
    assert same.position_bytes == same.step.position_bytes
  parts = {
    name: (times, part)
    for name, times, part in round_cost(TINY, cost, K, 2, 50).parts
  }
  assert parts[f"draft, {K} tokens"][0] == 1
  assert parts["draft successor, 1 token"][0] == K
  kind = "published_block"  # of whose own embeddings a block reads two rows
  own, shared = (
    head_cost.drafter_cost(draft_head(kind, True, embed=embed), TARGET)
    for embed in ("own", "shared")
  )
  assert shared.step.all_reduces == ((1, 2 * 4 * TARGET.width / K),)
  assert own.step == shared.step._replace(all_reduces=())
  assert own.level == shared.level
  assert own.weight_bytes - shared.weight_bytes == 4 * V * TARGET.width
  wide = head_cost.drafter_cost(draft_head("dflash"), TARGET)
  names = [x[0] for x in round_cost(TINY, wide, 1, 2, 50).parts]
  assert f"draft, {K + 1} tokens" in names  # however few are drafted
  chosen = draft_head("dflash2", full=True)
  cost = head_cost.drafter_cost(chosen, TARGET)
  # Of the selector's tables a draft token reads its row, and its candidates'.
  rank, block_width = chosen.head_config.block.rank, chosen.head_config.width
  assert cost.level.bytes == 4 * rank * (block_width + 1 + 3)
  cut = head_cost.drafter_cost(draft_head("jetspec"), TARGET)
  names = [x[0] for x in round_cost(TINY, cut, 1, 2, 50).parts]
  assert "draft, 2 tokens" in names


@pytest.mark.parametrize(
  "kind, windowed", [("windowed", 1), ("published_block", 1), ("dflash", 0)]
)
def test_layers_with_a_window_read_no_more_than_it(kind, windowed):
  head = draft_head(kind, full=True)
  config, cost = head.head_config, head_cost.drafter_cost(head, TARGET)
  size = 4 * 2 * config.num_kv_heads * config.head_dim
  scores = 4 * config.num_heads * config.head_dim
  slots, window = head.num_slots(), config.block.window or 1
  for context in (2, 50):
    seen = (config.num_layers - windowed) * context
    seen += windowed * min(context, window - 1)  # less the token itself
    [(_, _, part)] = round_cost(TINY, cost, K, 2, context).only("draft, ").parts
    terms = {term.name: term for term in part.terms}
    assert terms["KV read"].bytes == 2 * seen * size
    among = config.num_layers * slots
    assert terms["KV read"].flops == 2 * slots * (seen + among) * scores
    assert terms["KV written"].bytes == 2 * slots * config.num_layers * size
  # The cache keeps all of the text.
  assert cost.position_bytes == config.num_layers * size


def test_a_selector_searches_a_slots_logits_once_for_every_candidate():
  head, count = draft_head("dflash2", full=True), 3
  cost = head_cost.drafter_cost(head, TARGET)
  for draft, nodes in ((2, 2), ((3, 4), 4)):  # a tree's nodes share the search
    parts = round_cost(TINY, cost, draft, 5, 50).only("draft").parts
    moved = {"draft": 0, "draft successor": 0}
    for name, times, part in parts:
      [logits] = (term for term in part.terms if term.name == "logits")
      moved[name.split(",")[0]] += times * logits.bytes
    assert moved["draft"] == 2 * 4 * 5 * 2 * V * (1 + count)
    assert moved["draft successor"] == 2 * 4 * 5 * nodes * V
  head = draft_head("dflash2")
  net, logits = weights("dflash2")["net"], jnp.arange(22.0).reshape(1, 2, 11)
  ids, own = head.offer(net, logits)
  assert ids.shape == own.shape == (1, 2, count)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dspark"])
def test_only_slots_that_are_drafted_are_projected(kind, full):
  """All run, but a causal block's, and the weights are read once."""
  head = draft_head(kind, full)
  cost = head_cost.drafter_cost(head, TARGET)
  num_tokens = V if full else len(learned_kinds.IDS)
  # Without a successor the pass spreads fewer tokens over the vocabulary.
  spread = 0 if full or kind == "dspark" else V
  rows, layers = 2 * num_tokens * head.head_config.width, cost.step.flops
  read = []
  for k in (1, K):
    [(_, times, part)] = round_cost(TINY, cost, k, 2, 50).only("draft, ").parts
    terms = {term.name: term for term in part.terms}
    assert times == 1
    assert terms["logits"].bytes == 2 * 4 * 2 * k * (num_tokens + spread)
    products = terms["weights"].flops + terms["projection"].flops
    assert products == 2 * (head.num_slots(k) * layers + k * rows)
    read.append(terms["weights"].bytes + terms["projection"].bytes)
  assert read[0] == read[1] == cost.step.bytes + cost.step.split_bytes
