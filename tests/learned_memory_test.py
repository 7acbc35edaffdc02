"""No learned drafter's rounds copy a cache, the target's or its own.

Rule 9; the search is cache_copies.py's.
"""

import jax
import jax.numpy as jnp
import pytest

from cache_copies import (
  MAX_LENGTH,
  TARGET,
  arguments,
  cache_buffers,
  check_in_place,
  copies,
)
from learned_kinds import KINDS, head_config
from specdec import acceptance, decode, draft_shape, draft_tree, drafters
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve
from specdec.models import transformer
from specdec.types import Params

BATCH = 4
SLOW = pytest.mark.slow
IDS = range(11)
REMEMBERING = ("eagle", "eagle3", "mtp", "recycle")
SHAPES = {
  "chain": lambda: draft_shape.chain(4),
  "tree": lambda: draft_shape.static(
    draft_tree.from_paths([(0,), (1,), (0, 0)])
  ),
  "dynamic": lambda: draft_shape.dynamic(2, 3, 6),
  "behind copies": lambda: draft_shape.chain(2),
}
COPIED = 5  # more than it drafts
DUE = {
  ("eagle", "chain"),
  ("eagle3", "chain"),
  ("mtp", "tree"),
  ("prophet", "tree"),
  ("medusa", "chain"),
  ("hydra", "tree"),
  ("recycle", "dynamic"),
  ("head", "chain"),
  ("eagle3", "behind copies"),
}


def lower(kind, shape):
  """`generate`, lowered, and the shapes of its caches' buffers."""
  features = {"features": (1, 2)} if kind == "eagle3" else {}
  exits = {"exit_layer": 1} if kind in ("recycle", "head") else {}
  made = head_config(kind, **features, **exits)
  draft_head = drafters.LEARNED[made.kind](made, TARGET, jnp.asarray(IDS))
  model = transformer.model(TARGET)
  max_external_drafts = COPIED if shape == "behind copies" else 0
  drafter = serve.drafter(
    draft_head, model, SHAPES[shape](), max_external_drafts=max_external_drafts
  )
  if max_external_drafts:
    drafter = drafters.fallback(drafters.lookup(max_external_drafts), drafter)
  pair = drafter, acceptance.rejection()
  static, (params, *rest, settings) = arguments(pair, BATCH, TARGET, TARGET)
  draft = jax.eval_shape(
    lambda target: draft_heads.weights_of(
      draft_head, draft_head.init(jax.random.key(0)), target
    ),
    params.target,
  )

  def generate(params, *rest):
    *rest, settings = rest
    return decode.generate(
      *static, params, *rest, max_length=MAX_LENGTH, sampling=settings
    )

  lowered = jax.jit(generate).lower(
    Params(params.target, draft), *rest, settings
  )
  return lowered, cache_buffers(lowered.out_info)


@pytest.mark.parametrize(
  "kind, shape",
  [
    pytest.param(kind, shape, marks=() if (kind, shape) in DUE else SLOW)
    for kind in KINDS
    for shape in SHAPES
    if not (shape == "behind copies" and head_config(kind).exits)
  ],
)
def test_generation_never_copies_a_cache(kind, shape):
  lowered, (cache, own) = lower(kind, shape)
  assert len(own) == (2 if kind in REMEMBERING else 0)
  check_in_place(lowered, cache, own)


@SLOW
def test_the_search_finds_a_cache_that_is_kept(monkeypatch):
  """As a drafter would that goes back to what was before its draft tokens."""
  honest = serve.drafter

  def keeping(*args, **options):
    drafter = honest(*args, **options)

    def propose(params, state, context):
      draft, after = drafter.propose(params, state, context)
      return draft, (state, after)

    def update(params, state, *rest):
      before, after = state
      after = drafter.update(params, after, *rest)
      old = [k[:, :, :1].sum() for k, _ in before.cache.layers]
      return after._replace(seed=after.seed + 0 * sum(old))

    return drafter._replace(propose=propose, update=update)

  monkeypatch.setattr(serve, "drafter", keeping)
  lowered, (cache, own) = lower("eagle", "chain")
  assert copies(lowered.compile().as_text(), cache + own)
