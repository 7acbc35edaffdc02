"""The conformance kit on everything that exists, and on planted bugs."""

import dataclasses
import functools
import importlib.util
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import learned_kinds
from learned_kinds import small_chunks  # noqa: F401, a fixture
from specdec import (
  acceptance,
  draft_length,
  draft_shape,
  draft_tree,
  drafters,
)
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models import transformer
from specdec.testing import check_drafter, check_rule, distribution_checks
from specdec.testing.drafter_conformance import INVARIANTS
from specdec.testing.rule_conformance import RULE_INVARIANTS
from specdec.types import Params, Resume, Skip, Sparse

TABLE, TABLES = learned_kinds.TABLE, learned_kinds.TABLES
V = TABLE.vocab_size
TREE = draft_shape.static([-1, 0, 0, 1, 1, 2])
CHAINS = draft_shape.static(draft_tree.parallel(2, 2), "iid")
DYNAMIC = draft_shape.dynamic(2, 3, 5)
REJECTION = (acceptance.rejection(),)
KSEQ = (*REJECTION, acceptance.kseq())
SLOW = pytest.mark.slow


def slow(*case):
  return pytest.param(*case, marks=SLOW)


def split_table():
  """A table whose draft, of layer_skip, is another table."""

  def apply(params, tokens, cache, skip=None, **options):
    table = params["whole" if skip is None else "kept"]
    return TABLE.apply(table, tokens, cache, **options)

  return TABLE._replace(apply=apply)


SPLIT = split_table()


@pytest.mark.parametrize(
  "drafter, rules",
  [
    (lambda: drafters.lookup(3, ngram=2, min_ngram=1), REJECTION),
    (lambda: drafters.model(TABLE, 3), None),
    (lambda: drafters.model(TABLE, shape=TREE), REJECTION),
    slow(lambda: drafters.model(TABLE, shape=CHAINS), KSEQ),
    slow(lambda: drafters.model(TABLE, shape=DYNAMIC), REJECTION),
    (lambda: drafters.model(TABLE, 0), REJECTION),
    (lambda: drafters.quantized(TABLE, 3), REJECTION),
    slow(lambda: drafters.quantized(TABLE, shape=TREE), None),
    slow(lambda: drafters.model(TABLE, shape=TREE), None),
    slow(lambda: drafters.lookup(4, ngram=2, min_ngram=0), None),
    slow(lambda: drafters.model(TABLE, shape=CHAINS), None),
    slow(lambda: drafters.model(TABLE, shape=DYNAMIC), None),
    slow(lambda: drafters.model(TABLE, 1), REJECTION),
  ],
  ids=lambda x: "",
)
def test_drafters_of_a_table(drafter, rules):
  """Of every kind of siblings; None: under every rule that fits."""
  check_drafter(drafter, TABLE, TABLES, rules=rules)


def test_a_threshold_by_enumeration():
  """Its own token ends a row's draft, and is verified."""
  check_drafter(
    lambda: drafters.layer_skip(SPLIT, Skip(), 3, drafters.Threshold(0.5)),
    SPLIT,
    Params({"whole": TABLES.target, "kept": TABLES.draft}),
    rules=(*REJECTION, acceptance.block()),
  )


CHAIN = draft_shape.chain(2)


@pytest.mark.parametrize(
  "kind, ids, copies, shape",
  [
    # More siblings than tokens to draft: the last is any other token.
    ("mtp", (0, 2), 0, draft_shape.static([-1, 0, 0, 0])),
    ("mtp", (), 3, CHAIN),  # after copies
    slow("mtp", (1, 2), 3, CHAIN),
    slow("mtp", (0, 2), 0, draft_shape.chain(3)),
    slow("published_eagle3", (0, 2, 3), 0, CHAIN),
    slow("published_eagle3", (1, 3), 0, draft_shape.static([-1, 0, 0, 1])),
    # With 3 copies its queries are as large as the target's cache.
    slow("published_eagle3", (1, 2), 2, CHAIN),
    *(slow(kind, (1, 3), 0, CHAIN) for kind in learned_kinds.KINDS[8:]),
  ],
)
def test_heads_by_enumeration(kind, ids, copies, shape):
  drafter, params = learned_kinds.of_table(kind, ids, shape, copies)
  published = kind.startswith("published") and drafter.spec.chain
  rules = (*REJECTION, acceptance.block()) if published else REJECTION
  check_drafter(drafter, learned_kinds.STREAMS, params, rules=rules)


# Of a head size for which attention on a CPU is that of the C++ kernels.
WIDE = dataclasses.replace(learned_kinds.TARGET, head_dim=32)
CONFIGS = learned_kinds.CONFIGS | {"wide": WIDE}


@functools.cache
def llama(name="llama"):
  """(model, params of target and a draft that often agrees)."""
  config = CONFIGS[name]
  target, other = (
    jax.tree.map(lambda x: 3 * x, transformer.init_params(config, key))
    for key in jax.random.split(jax.random.key(0))
  )
  draft = jax.tree.map(lambda t, o: t + 0.3 * o, target, other)
  return transformer.model(config), Params(target, draft)


def exits(layer, k=None, shape=None):
  return lambda target: drafters.early_exit(target, layer, k, shape=shape)


def skips(skip, k=None, shape=None, threshold=None):
  return lambda target: drafters.layer_skip(
    target, skip, k, threshold and drafters.Threshold(threshold), shape=shape
  )


NARROW = Sparse(window=2, sinks=1)
SOME, ALL = Skip((1,), (1, 2)), Skip((0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize(
  "name, drafter, rules",
  [
    slow("llama", lambda target: drafters.model(target, 3), REJECTION),
    ("t5", exits(2, 3), REJECTION),
    slow("gemma", exits(1, 3), REJECTION),
    slow("wide", exits(2, shape=DYNAMIC), REJECTION),
    slow("t5", lambda target: drafters.model(target, shape=TREE), REJECTION),
    slow("t5", lambda target: drafters.model(target, 3), None),
    slow("t5", lambda target: drafters.quantized(target, 3), REJECTION),
    slow("t5", skips(SOME, shape=CHAINS), KSEQ),
    slow("t5", exits(1, shape=DYNAMIC), REJECTION),
    slow(
      "t5",
      lambda target: drafters.lookup(3, ngram=2, min_ngram=0),
      REJECTION,
    ),
    slow("gemma", exits(2, shape=CHAINS), KSEQ),
    ("llama", skips(SOME, 2, threshold=0.3), REJECTION),
    slow(
      "llama", lambda target: drafters.quantized(target, shape=TREE), REJECTION
    ),
    slow("gemma", lambda target: drafters.quantized(target, 4), REJECTION),
    ("llama", lambda target: drafters.sparse(target, NARROW, 3), REJECTION),
    slow("gemma", lambda target: drafters.sparse(target, NARROW, 3), None),
    slow(
      "t5",
      lambda target: drafters.sparse(target, NARROW, shape=TREE),
      REJECTION,
    ),
    slow(
      "wide",
      lambda target: drafters.sparse(target, NARROW, shape=DYNAMIC),
      REJECTION,
    ),
    slow("llama", skips(Skip((0,), (0,)), shape=TREE), REJECTION),
    slow("llama", exits(2, 8), REJECTION),
    slow("llama", exits(2, 0), REJECTION),
    slow("llama", exits(2, shape=TREE), REJECTION),
    slow("gemma", exits(1, shape=DYNAMIC), REJECTION),
    slow("gemma", skips(Skip((1,), (2,)), 3, threshold=0.08), REJECTION),
    slow("llama", skips(SOME, 4, threshold=0.3), REJECTION),
    slow("gemma", skips(Skip((0, 2), (0,)), 4, threshold=0.08), REJECTION),
    slow("llama", skips(ALL, 8, threshold=0.3), REJECTION),
    slow("llama", skips(SOME, 0, threshold=0.3), REJECTION),
    slow("llama", skips(SOME, shape=CHAINS), KSEQ),
    slow("llama", skips(SOME, shape=DYNAMIC), REJECTION),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_drafters_of_a_transformer(name, drafter, rules):
  target, params = llama(name)
  stats = check_drafter(lambda: drafter(target), target, params, rules=rules)
  if drafter(target).spec.max_depth:  # some were accepted, some refused
    assert 0 < stats.accepted.sum() < stats.evaluated.sum()


@functools.cache
def head(kind, shape, full):
  target, _ = learned_kinds.target()
  drafter = serve.drafter(learned_kinds.draft_head(kind, full), target, shape)
  # A second width is half a program more; trees with two copy caches on CPU.
  narrow = shape.loops and kind == "head"
  return learned_kinds.stumbling(drafter, narrow)


@pytest.mark.parametrize(
  "kind, shape",
  [
    ("mtp", TREE),
    ("medusa", draft_shape.chain(3)),
    ("head", draft_shape.chain(3)),
    slow("eagle", TREE),
    slow("prophet", TREE),
    slow("hydra", TREE),
    slow("recycle", DYNAMIC),
    slow("eagle3", draft_shape.chain(3)),
    slow("recycle", TREE),
    slow("recycle", draft_shape.chain(0)),
    slow("eagle", draft_shape.chain(1)),
    *(slow(kind, DYNAMIC) for kind in ("eagle", "mtp", "medusa", "head")),
    *(slow(kind, CHAINS) for kind in ("eagle3", "prophet", "hydra")),
  ],
)
def test_draft_heads(kind, shape):
  """With rounds that are not drafted; chains draft every token."""
  target, params = learned_kinds.target()
  full = shape.loops
  params = Params(params, learned_kinds.weights(kind, full))
  make = functools.partial(head, kind, shape, full)
  stats = check_drafter(make, target, params, rules=REJECTION)
  if not shape.spec.max_depth:
    return
  assert 0 < stats.accepted.sum() < stats.evaluated.sum()
  assert np.all(stats.rounds > stats.drafted[:, 0])  # some were not drafted
  assert np.all(stats.widths > 0)


@SLOW
@pytest.mark.parametrize("kind", ["mtp", "eagle3", "medusa"])
def test_draft_heads_of_an_encoder_decoder(kind):
  target, params = learned_kinds.target("t5")
  head = learned_kinds.draft_head(kind, config=learned_kinds.T5)
  net = learned_kinds.sharpened(head.init(jax.random.key(1)), 6)
  drafter = serve.drafter(head, target, draft_shape.chain(3))
  weights = draft_heads.weights_of(head, net, params)
  stats = check_drafter(
    drafter, target, Params(params, weights), rules=REJECTION
  )
  assert 0 < stats.accepted.sum() < stats.evaluated.sum()


@pytest.mark.parametrize("kind", ["eagle", slow("mtp"), slow("medusa")])
def test_fallbacks(kind):
  target, params = learned_kinds.target()
  head = learned_kinds.draft_head(kind, True)
  behind = serve.drafter(
    head, target, draft_shape.chain(3), max_external_drafts=5
  )
  first = drafters.lookup(5, ngram=2, min_ngram=1)
  check_drafter(
    lambda: drafters.fallback(first, behind),
    target,
    Params(params, learned_kinds.weights(kind, True)),
    rules=REJECTION,
  )


def test_a_fallback_in_the_targets_scratch():
  target, params = llama("llama")
  first = drafters.lookup(5, ngram=2, min_ngram=1)
  behind = drafters.sparse(target, NARROW, 3)
  check_drafter(
    lambda: drafters.fallback(first, behind), target, params, rules=REJECTION
  )


def example(name):
  """A module of examples/."""
  path = pathlib.Path(__file__).parents[1] / "examples" / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def letters(text):
  return [ord(letter) % V for letter in text[:2000]]


LOADED = types.SimpleNamespace(  # what Setup passes to a drafter's function
  model=TABLE,
  checkpoint=types.SimpleNamespace(
    tokenizer=types.SimpleNamespace(encode=letters)
  ),
)


@pytest.mark.parametrize("shape", [CHAINS, slow(draft_shape.chain(3))])
def test_the_bigram_example(shape):
  drafter, weights = example("bigram").bigram(LOADED, shape)
  params = TABLES._replace(draft=weights)
  check_drafter(drafter, TABLE, params, rules=KSEQ)


@pytest.mark.parametrize(
  "shape, skip",
  [
    (draft_shape.chain(3), []),
    (draft_length.adaptive(3, [1.0, 1.1, 1.2, 1.3]), ["rows", "slots"]),
  ],
  ids=["chain", "adaptive"],
)
def test_the_recent_example(shape, skip):
  drafter = example("recent").recent(LOADED, shape)
  check_drafter(drafter, TABLE, TABLES, rules=REJECTION, skip=skip)


@pytest.mark.parametrize(
  "rule",
  [
    acceptance.rejection(),
    acceptance.block(),
    acceptance.kseq(),
    acceptance.naive(),
    acceptance.traversal(),
    acceptance.multipath(),
    acceptance.coupled(),
    acceptance.greedy(),
    acceptance.lenience(0.5),
    acceptance.fly(window=1),
    acceptance.typical(),
    acceptance.relaxed(2, 0.5),
    acceptance.synthetic([0.8, 0.5]),
    example("nucleus").nucleus(),
  ],
  ids=lambda rule: rule.name,
)
def test_rules(rule):
  sampled = rule is not acceptance.greedy()
  check_rule(rule, temperatures=(1.0, 0.0) if sampled else (0.0,))


# Planted bugs: the invariant must be named.


def broken(
  invariant, drafter, sentence="", target=TABLE, params=TABLES, **more
):
  more = {"rules": REJECTION, "skip": {*INVARIANTS} - {invariant}} | more
  with pytest.raises(AssertionError, match=f"breaks '{invariant}'") as error:
    check_drafter(drafter, target, params, **more)
  assert sentence in str(error.value), error.value


def proposing(change, drafter=None):
  """The same drafter, its draft changed: change(draft, context) -> draft."""
  drafter = drafter or drafters.model(TABLE, 3)

  def propose(params, state, context):
    draft, state = drafter.propose(params, state, context)
    return change(draft, context), state

  return drafter._replace(propose=propose)


def test_every_invariant_has_a_planted_bug():
  source = pathlib.Path(__file__).read_text()
  for name in INVARIANTS:
    assert f'broken("{name}"' in source
  for name in RULE_INVARIANTS:
    assert f'"{name}", ' in source


def test_a_constructor_that_is_not_cached():
  constructor = drafters.model.__wrapped__
  broken("trace", lambda: constructor(TABLE, 3), "two drafters")


def test_a_spec_that_cannot_be_hashed():
  lookup = drafters.lookup(2)
  spec = lookup.spec._replace(widths=list(lookup.spec.widths))
  broken("trace", lookup._replace(spec=spec), "cannot be hashed")


def carrying(init):
  """A drafter of one token, or none, as its state says of each row."""
  lookup = drafters.lookup(1, min_ngram=0)

  def propose(params, state, context):
    draft, _ = lookup.propose(params, None, context)
    return draft._replace(count=1 + state[: len(draft.count)]), state

  return lookup._replace(
    init=lambda params, context, output: init(len(context.length)),
    propose=propose,
    update=lambda params, state, *rest: state,
  )


def test_rows_that_know_their_slot():
  first = carrying(lambda batch: 0 + (jnp.arange(batch) < batch // 2))
  broken("slots", first, "row 3 in the place of another")


def test_a_state_of_two_entries_a_row():
  doubled = carrying(lambda batch: jnp.zeros(2 * batch, jnp.int32))
  broken("slots", doubled, "its rows cannot be told apart: state.draft_state")


def test_a_target_cache_that_was_written_to():
  def resumed(draft, context):
    layers = context.target_cache.layers
    wrong = tuple((keys + 1, values) for keys, values in layers)
    return draft._replace(resume=Resume(None, wrong))

  broken("coupled", proposing(resumed), "row 0")


def test_a_drafter_that_never_drafts():
  silent = proposing(lambda draft, _: draft._replace(count=0 * draft.count + 1))
  silent = silent._replace(spec=silent.spec._replace(widths=(1, 4)))
  broken("coupled", silent, "nothing was drafted")


def test_a_rule_that_is_not_greedy():
  rules = [acceptance.synthetic([0.9])]
  broken("greedy", drafters.model(TABLE, 3), "under synthetic", rules=rules)


def test_a_batch_that_falls_apart_once_a_row_has_stopped():
  honest = drafters.lookup(3, ngram=2, min_ngram=1)

  def propose(params, stopped, context):
    draft, _ = honest.propose(params, None, context)
    layers = tuple(
      (jnp.where(stopped, keys + 1, keys), values)
      for keys, values in context.target_cache.layers
    )
    return draft._replace(resume=Resume(None, layers)), stopped

  def update(params, stopped, context, draft, accept_result, output):
    length = context.length + accept_result.num_committed
    early = accept_result.done & (length < context.tokens.shape[1])
    return stopped | jnp.any(early)

  drafter = honest._replace(
    init=lambda *_: jnp.bool_(False), propose=propose, update=update
  )
  broken("eos", drafter, "EOS")


def test_rows_that_share_a_temperature():
  honest = drafters.model(TABLE, 3)

  def propose(params, state, context):
    first = jax.tree.map(
      lambda x: jnp.broadcast_to(x[:1], x.shape), context.sampling
    )
    return honest.propose(params, state, context._replace(sampling=first))

  broken("rows", honest._replace(propose=propose), "with other neighbours")


def raw(draft, context):
  """The distribution before its tails were cut off."""
  flat = jnp.maximum(draft.log_probs, jnp.log(0.02))
  return draft._replace(log_probs=jax.nn.log_softmax(flat))


def unlikely_dropped(draft, context):
  """Rule 7: the token that ends a draft must be verified, too."""
  drawn = jnp.take_along_axis(draft.log_probs, draft.tokens[..., None], 2)
  going = jnp.cumprod(drawn[:, 1:, 0] > jnp.log(0.3), axis=1)
  return draft._replace(count=1 + jnp.sum(going, axis=1))


def halved(draft, context):
  return draft._replace(log_probs=draft.log_probs - jnp.log(2.0))


def drawn_again(draft, context):
  """Node 2 is drawn by node 1's noise."""
  token = jnp.argmax(draft.log_probs[:, 2] + context.noise(1, 1), axis=-1)
  return draft._replace(tokens=draft.tokens.at[:, 2].set(token))


def by_noise(draft, context):
  """Tokens that are called deterministic, and are not."""
  token = jnp.argmax(context.noise(1, 1), axis=-1)
  return draft._replace(tokens=draft.tokens.at[:, 1].set(token))


@pytest.mark.parametrize(
  "change, sentence",
  [
    (raw, "not the likeliest"),
    (halved, "adds up to"),
    (unlikely_dropped, "must be verified too"),
    (drawn_again, "node 2"),
  ],
)
def test_distributions_that_were_not_drawn_from(change, sentence):
  drafter = proposing(change)
  drafter = drafter._replace(spec=drafter.spec._replace(widths=(1, 4)))
  broken("drawn", drafter, sentence)


def test_an_honest_draft_passes_what_is_planted_below(capsys):
  """So that what is named is the bug, not the way that it is planted."""
  honest = proposing(lambda draft, _: draft)
  check_drafter(honest, TABLE, TABLES, rules=[], skip=["copies"])
  printed = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in printed] == [*INVARIANTS]
  assert printed[0] == f"trace         holds: {INVARIANTS['trace']}"
  assert printed[-1] == f"copies        left out: {INVARIANTS['copies']}"


def test_a_deterministic_draft_that_peeks_at_the_noise():
  drafter = proposing(by_noise, drafters.lookup(3, ngram=2, min_ngram=0))
  broken("drawn", drafter, "depend on noise")


@pytest.mark.parametrize("texts", [4, 64])
def test_too_few_draws_are_refused(texts):
  seen = np.zeros(texts)
  seen[0] = 64 if texts == 64 else 0
  with pytest.raises(ValueError, match="raise draws"):
    distribution_checks._p_value(seen, np.full(texts, 1 / texts))


def test_a_state_that_keeps_refused_tokens():
  honest = example("recent").recent(LOADED, draft_shape.chain(3))

  def update(params, state, context, draft, accept_result, output):
    path = jnp.broadcast_to(jnp.arange(4), draft.tokens.shape)
    whole = jnp.full_like(accept_result.num_committed, 4)
    result = accept_result._replace(path=path, num_committed=whole)
    return honest.update(params, state, context, draft, result, output)

  broken("state", honest._replace(update=update), "after a round")


def test_a_state_that_goes_on_behind_an_eos():
  honest = example("recent").recent(LOADED, draft_shape.chain(3))

  def update(params, state, context, draft, accept_result, output):
    whole = 1 + jnp.sum(jnp.diff(accept_result.path) > 0, axis=1)
    whole = jnp.where(accept_result.num_committed > 0, whole, 0)
    result = accept_result._replace(num_committed=whole)
    return honest.update(params, state, context, draft, result, output)

  broken("state", honest._replace(update=update))


def test_siblings_that_are_not_drawn_alike():
  """Two children, and the second of another distribution than the first."""
  shape = draft_shape.static([-1, 0, 0], "iid")

  def change(draft, context):
    other = jax.nn.log_softmax(0.3 * draft.log_probs[:, 2])
    token = jnp.argmax(other + context.noise(1, 2), axis=-1)
    return draft._replace(
      tokens=draft.tokens.at[:, 2].set(token),
      log_probs=draft.log_probs.at[:, 2].set(other),
    )

  drafter = proposing(change, drafters.model(TABLE, shape=shape))
  broken("distribution", drafter, "under kseq", rules=[acceptance.kseq()])


def test_whole_texts_of_a_draft_that_lies():
  drafter = proposing(lambda draft, _: draft._replace(
    log_probs=jnp.full_like(draft.log_probs, -jnp.log(V))
  ))  # fmt: skip
  broken("distribution", drafter, "chi-square", rules=[])


def test_a_cache_that_is_kept_beside_its_successor():
  target, params = llama()
  honest = drafters.lookup(3, ngram=2, min_ngram=0)

  def update(params, state, context, *rest):
    return context.target_cache.layers[0]

  drafter = honest._replace(
    init=lambda params, context, _: context.target_cache.layers[0],
    update=update,
  )
  broken("copies", drafter, "copy", target, params)


def test_unknown_invariants_are_refused():
  with pytest.raises(ValueError, match="no invariant speed; they are trace, "):
    check_drafter(drafters.lookup(1), TABLE, TABLES, skip=["speed"])


def of_rejection(**changes):
  """Rejection, some of it replaced: name -> honest function -> function."""
  rule = acceptance.rejection()
  return rule._replace(
    **{
      name: change(getattr(rule, name)) if callable(change) else change
      for name, change in changes.items()
    }
  )


def unclipped(honest):
  def accept_prob(draft, target_log_probs):
    accept = honest(draft, target_log_probs)
    return jnp.where(accept == 1, 1.2, accept)

  return accept_prob


def all_in_use(honest):
  def call(draft, *args):
    return honest(draft._replace(count=len(draft.tokens)), *args)

  return call


PLANTED_IN_RULES = [
  ("caveat", {"lossless": False}),
  ("caveat", {"caveat": "lossy: it says"}),
  ("traced", {"accept_prob": lambda honest: lambda *args: (
    honest(*args) if float(args[1].sum()) else None)}),
  ("probability", {"accept_prob": unclipped}),
  ("residual", {"residual": lambda honest: lambda *args: 0.9 * honest(*args)}),
  ("residual", {"residual": lambda honest: lambda *args: honest(*args) - 0.2}),
  ("unused", {"residual": all_in_use}),
  ("distribution", {"residual": lambda _: lambda draft, target, node: (
    jnp.exp(target[node]))}),
  ("distribution", {"lossless": False, "caveat": "lossy, it says"}),
]  # fmt: skip


@pytest.mark.parametrize("invariant, changes", PLANTED_IN_RULES)
def test_rules_that_are_wrong(invariant, changes):
  with pytest.raises(AssertionError, match=f"rejection breaks '{invariant}'"):
    check_rule(of_rejection(**changes))
