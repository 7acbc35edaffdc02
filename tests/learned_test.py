"""Learned drafters, all kinds, from random weights: text, distributions, rows,
refusals.

That they are right is that serve.py drafts by the very distributions that
unroll.py is trained on (trap B21), whatever was accepted; conformance_test
checks what holds for every drafter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learned_kinds import (
  IDS,
  KINDS,
  TARGET,
  V,
  draft_head,
  head_config,
  stumbling,
  target,
  weights,
)
from specdec import (
  acceptance,
  decode,
  draft_shape,
  drafters,
  sampling,
  step,
)
from specdec import (
  cache as kv,
)
from specdec import draft_tree as trees
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing, unroll
from specdec.drafters.heads.vocabulary import most_frequent
from specdec.types import ACCEPTED, CORRECTION, Params
from texts import texts

L, K = 30, 3
LENGTHS = np.array([1, 2, 5, 9] * 2)
BATCH = len(LENGTHS)
TEMPERATURES = np.repeat([1.0, 0.0], 4)
NEVER = -1  # no token is this one
PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
SHAPES = {
  "tree": draft_shape.static(trees.from_paths(PATHS)),
  "dynamic": draft_shape.dynamic(2, 3, 6),
}
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv, "CHUNK", 4)
    yield


# A module's fixture: pytest puts the tests of one kind side by side, and they
# share their programs.
@pytest.fixture(scope="module", params=KINDS)
def kind(request):
  return request.param


NARROW = {("eagle", K), ("recycle", K), ("recycle", "tree")}


@functools.cache
def drafter_of(kind, shape, full=False):
  """shape: k of a chain, or a name in SHAPES."""
  grown = SHAPES[shape] if shape in SHAPES else draft_shape.chain(shape)
  drafter = serve.drafter(draft_head(kind, full), target()[0], grown)
  # A second width is half a program more: for some of them.
  return stumbling(drafter, narrow=(kind, shape) in NARROW)


def prompts(seed=0):
  return np.random.default_rng(seed).integers(0, V, size=(BATCH, 9))


def speculate(
  drafter,
  rule,
  draft,
  temperature=TEMPERATURES,
  prompt=None,
  length=LENGTHS,
  end=NEVER,
  most=decode.MAX_ROUNDS,
):
  """One program for whatever is not the first two."""
  model, params = target()
  params = Params(params, draft)
  state = decode.start(
    model,
    drafter,
    rule,
    params,
    jnp.asarray(prompts() if prompt is None else prompt),
    jnp.asarray(length),
    jax.random.key(0),
    max_length=L,
    sampling=sampling.settings(BATCH, jnp.asarray(temperature)),
  )
  ends = jnp.array([end], jnp.int32)
  return decode.run(model, drafter, rule, params, state, ends, jnp.int32(most))


COUPLED, REJECTION = acceptance.coupled(), acceptance.rejection()


@functools.cache
def baseline(end=NEVER):
  return texts(
    speculate(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, None, end=end)
  )


# Compiling is what costs: these run by default, and the rest is slow.
DUE = {
  "tree's distributions": ("eagle", "prophet", "recycle"),
  "dynamic": ("recycle",),  # borrows the target's scratch, in another order
}


def kinds_for(what):
  """All of them, slow but for those that are due."""
  due = DUE[what]
  marked = [k if k in due else pytest.param(k, marks=SLOW) for k in KINDS]
  return pytest.mark.parametrize("kind", marked, scope="module")


# B21: the teacher-forced form and the one that decodes.


@functools.cache
def teacher(kind, full=False):
  """(tokens [B, T], draft's weights) -> distributions [levels, B, T, V]: level
  j is of
  what follows each token when the round began j tokens before."""
  model, params = target()
  own = draft_head(kind, full, place=growing)

  @jax.jit
  def distributions(tokens, draft):
    output, _ = model.apply(params, tokens, None, features=own.features)
    target_weights = draft_heads.target_weights_of(Params(params, draft))
    logits, _ = unroll(own, draft["net"], target_weights, tokens, output, K)
    return jax.nn.log_softmax(draft_heads.spread(own, jnp.stack(logits)))

  return distributions


def levels_of(origin, start, stop):
  """(place, level) of every token that was held against a draft token."""
  run, found = 0, []
  for p in range(start, stop):
    if origin[p] in (ACCEPTED, CORRECTION):
      found.append((p, run))
    run = run + 1 if origin[p] == ACCEPTED else 0
  return found


def differences(state, distributions, length=LENGTHS):
  """{level: [|what was handed over - what is taught|]} of a chain's text."""
  tokens, origin, said = (
    np.asarray(x) for x in (state.tokens, state.origin, state.draft_log_probs)
  )
  distributions, found = np.asarray(distributions), {}
  for b, (start, stop) in enumerate(zip(length, np.asarray(state.length))):
    for p, level in levels_of(origin[b], start, stop):
      ours, theirs = said[b, p], distributions[level, b, p - 1, tokens[b, p]]
      off = 0.0 if ours == theirs else abs(ours - theirs)  # both may be -inf
      found.setdefault(level, []).append(off)
  return found


def forms_apart(kind, drafter):
  """How far the two forms are apart, level by level."""
  state = speculate(drafter, REJECTION, weights(kind), np.ones(BATCH))
  return differences(state, teacher(kind)(state.tokens, weights(kind)))


def test_b21_a_chain_is_drafted_by_the_distributions_it_is_trained_on(kind):
  found = forms_apart(kind, drafter_of(kind, K))
  assert set(found) == set(
    range(K)
  )  # draft tokens of every level were evaluated
  assert len(found[0]) > 50 and len(found[1]) > 5
  for level, off in found.items():
    assert max(off) < 1e-4, level


@functools.cache
def proposing(kind, shape):
  drafter = drafter_of(kind, shape)

  @jax.jit
  def propose(draft, state):
    params = Params(target()[1], draft)
    context = step.context_of(state, V, COUPLED)
    draft, _ = drafter.propose(params, state.draft_state, context)
    return drafter.spec.with_tree(draft)

  return propose


def paths_of(parents):
  """Every node's path from the root, the root left out."""
  found = [()]
  for node, parent in enumerate(parents[1:], 1):
    found.append((*found[parent], node))
  return found


@kinds_for("tree's distributions")
def test_b21_so_is_a_tree_in_the_middle_of_a_text(kind):
  check_tree(kind, "tree")


@kinds_for("dynamic")
def test_b21_so_is_a_dynamic_tree(kind):
  check_tree(kind, "dynamic")


def check_tree(kind, shape):
  drafter, draft = drafter_of(kind, shape), weights(kind)
  state = speculate(drafter, COUPLED, draft, np.ones(BATCH), most=5)
  made = proposing(kind, shape)(draft, state)
  tokens = np.asarray(made.tokens)
  parents = np.broadcast_to(np.asarray(made.parents), tokens.shape)
  # Every node's path as the end of a text of its own.
  size = L + K
  lines = np.zeros((BATCH, tokens.shape[1], size), np.int32)
  ends = np.zeros(tokens.shape, int)
  for b, n in np.ndindex(*tokens.shape):
    path = tokens[b, list(paths_of(parents[b])[n])]
    length = int(state.length[b])
    lines[b, n, :length] = state.tokens[b, :length]
    lines[b, n, length : length + len(path)] = path
    ends[b, n] = length + len(path)
  distributions = teacher(kind)(lines.reshape(-1, size), draft)
  distributions = np.asarray(distributions).reshape(K, *lines.shape, V)
  checked = 0
  for b, n in np.ndindex(*tokens.shape):
    level = len(paths_of(parents[b])[n])
    children = [c for c in range(tokens.shape[1]) if parents[b, c] == n]
    if not children:
      continue
    distribution = np.array(distributions[level, b, n, ends[b, n] - 1])
    if made.log_probs is None:  # the likeliest are tried
      np.testing.assert_array_equal(
        tokens[b, children], np.argsort(-distribution)[: len(children)]
      )
      checked += len(children)
      continue
    for child in children:  # drawn one after another
      left = distribution - np.logaddexp.reduce(distribution)
      # Tokens that it cannot draft token have no probability in either.
      np.testing.assert_allclose(made.log_probs[b, child], left, atol=1e-4)
      assert set(np.flatnonzero(np.isfinite(left))) <= set(IDS)
      distribution[tokens[b, child]] = -np.inf
      checked += 1
  assert checked == BATCH * len(PATHS)


# Mistakes that B21 must see.


def nothing_run_again(drafter, patch):
  """What was drafted stays as it was drafted."""

  def update(params, state, *rest):
    after = drafter.update(params, state, *rest)
    layers = state.cache.layers
    return after._replace(cache=after.cache.replace(layers=layers))

  return drafter._replace(update=update)


def seed_too_early(drafter, patch):
  """The seed is what the target said one accepted token before."""

  def update(params, state, context, draft, accept_result, output):
    after = drafter.update(params, state, context, draft, accept_result, output)
    early = accept_result._replace(
      num_accepted=jnp.maximum(accept_result.num_accepted - 1, 0)
    )
    wrong = drafter.update(params, state, context, draft, early, output)
    return after._replace(seed=wrong.seed)

  return drafter._replace(update=update)


def prompt_shifted(drafter, patch):
  """A prompt's token is run with what the target said after it."""

  def init(params, context, output):
    shifted = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1), output)
    right = drafter.init(params, context, output)
    return drafter.init(params, context, shifted)._replace(seed=right.seed)

  return drafter._replace(init=init)


def view_changed(name, change):
  """Draft tokens are a position too `far`, or write `over` the one before."""

  def plant(drafter, patch):
    honest = serve.view_of

    def view_of(length, parents, first, *rest):
      view = honest(length, parents, first, *rest)
      return change(view) if first else view

    patch.setattr(serve, "view_of", view_of)
    return drafter

  plant.__name__ = name
  return plant


far = view_changed("far", lambda view: view._replace(where=view.where + 1))
over = view_changed("over", lambda view: view._replace(slot=view.slot - 1))


PLANTED = [
  ("eagle", nothing_run_again),
  pytest.param("medusa", seed_too_early, marks=SLOW),
  pytest.param("recycle", nothing_run_again, marks=SLOW),
  pytest.param("eagle3", prompt_shifted, marks=SLOW),
  pytest.param("mtp", far, marks=SLOW),
  pytest.param("prophet", over, marks=SLOW),
  pytest.param("eagle3", nothing_run_again, marks=SLOW),
  pytest.param("mtp", nothing_run_again, marks=SLOW),
  pytest.param("hydra", seed_too_early, marks=SLOW),
  ("prophet", seed_too_early),
  pytest.param("eagle", seed_too_early, marks=SLOW),
  pytest.param("recycle", seed_too_early, marks=SLOW),
  pytest.param("eagle", prompt_shifted, marks=SLOW),
  pytest.param("recycle", prompt_shifted, marks=SLOW),
  pytest.param("prophet", far, marks=SLOW),
  pytest.param("eagle", far, marks=SLOW),
  pytest.param("recycle", over, marks=SLOW),
]


@pytest.mark.parametrize("kind, plant", PLANTED)
def test_b21_sees(kind, plant, monkeypatch):
  honest = serve.drafter(draft_head(kind), target()[0], draft_shape.chain(K))
  planted = stumbling(plant(honest, monkeypatch))
  found = forms_apart(kind, planted)
  worst = max(max(off) for off in found.values())
  print(f"{kind}, {plant.__name__}: {worst:.3g}")
  assert worst > 1e-3  # ten times what is let pass


class TestVocabulary:
  def test_spread_puts_every_logit_in_its_place(self):
    logits = jnp.arange(2.0 * len(IDS)).reshape(2, -1)
    found = np.asarray(draft_heads.spread(draft_head("medusa"), logits))
    np.testing.assert_array_equal(found[:, IDS], logits)
    assert np.sum(np.isfinite(found)) == logits.size

  def test_the_most_frequent(self):
    text = np.array([[5, 1, 5], [2, 1, 3]])
    ids, part = most_frequent(text, 3, 8)
    assert ids.tolist() == [1, 2, 5] and part == 5 / 6  # of 2 and 3 the lower
    assert ids.dtype == np.int32
    ids, part = most_frequent(text, 6, 8)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5] and part == 1.0
    assert most_frequent(text, 0, 8) == (None, 1.0)
    ids, part = most_frequent(np.zeros((0, 3), int), 2, 8)
    assert ids.tolist() == [0, 1] and part == 0.0

  @pytest.mark.parametrize("ids", [None, IDS[:-1]])
  def test_another_one_than_the_head_configs(self, ids):
    given = "none" if ids is None else "10"
    with pytest.raises(ValueError, match=f"vocabulary = 11, and {given} are"):
      drafters.eagle(head_config("eagle"), TARGET, ids)


@pytest.mark.parametrize(
  "kind, changes, complaint",
  [
    ("eagle", dict(kind="beagle"), "kind 'beagle' is unknown; known: eagle, "),
    ("eagle", dict(head="our"), "head 'our' is unknown; known: own, shared"),
    ("eagle", dict(head="own"), "it must be 'shared'"),
    ("mtp", dict(levels=0), "levels = 0; it must be >= 1"),
    ("mtp", dict(vocabulary=-1), "vocabulary = -1"),
    ("mtp", dict(num_layers=0), "num_layers = 0 of mtp"),
    ("head", dict(num_layers=-1), "num_layers = -1 of exit"),
    ("medusa", dict(num_layers=1), "medusa has no layers"),
    ("eagle3", dict(features=()), "eagle3 needs features"),
    ("mtp", dict(features=(1,)), "mtp reads no layers"),
    ("head", dict(exit_layer=0), "an exit needs a layer above 0"),
    ("mtp", dict(exit_layer=1), "exit_layer = 1 of mtp"),
    (
      "mtp",
      dict(feeds_back_hidden=True),
      "recycle belongs to an exit, not to mtp",
    ),
    ("mtp", dict(num_heads=3, num_kv_heads=2), "num_heads"),
  ],
)
def test_head_configs_refuse(kind, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    head_config(kind, **changes)


@pytest.mark.parametrize(
  "kind, changes, complaint",
  [
    ("eagle3", dict(features=(1, 4)), "layers 4; this target has 3, so .*0..3"),
    ("eagle3", dict(features=(-1, 2)), "layers -1; this target has 3"),
    ("head", dict(exit_layer=3), "exit_layer = 3; .*must be in 1..2"),
    ("mtp", dict(vocabulary=18), "vocabulary = 18; the target has 17 tokens"),
  ],
)
def test_a_target_that_does_not_fit(kind, changes, complaint):
  with pytest.raises(ValueError, match=complaint):
    head_config(kind, **changes).check(TARGET)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_do_not_draft_token_deeper_than_they_are(kind):
  with pytest.raises(
    ValueError, match=f"5 levels of draft tokens.* {kind} has 4"
  ):
    drafter_of(kind, 5)


def test_an_exits_tree_keeps_what_it_runs():
  made = draft_head("recycle")
  with pytest.raises(ValueError, match="runs 7 nodes and the tree has 3"):
    serve.drafter(made, target()[0], draft_shape.dynamic(3, 3, 2))


def test_a_head_config_is_plain_data():
  assert HeadConfig("mtp") == HeadConfig("mtp") and hash(HeadConfig("mtp"))
