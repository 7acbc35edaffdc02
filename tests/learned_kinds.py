"""What tests of draft heads share: one of every kind, never trained.

Random weights, sharpened so that distributions are far from flat and draft
tokens are kept now and then.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec import cache as kv
from specdec import decode, drafters, sampling
from specdec.drafters import mask_slots
from specdec.drafters.heads import block_unroll
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads.block_config import BlockConfig
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing, unroll, unroll_slots
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.testing import table_model
from specdec.types import ACCEPTED, CORRECTION, Model, Params
from texts import texts

V = 17
IDS = np.array([0, 2, 3, 4, 6, 7, 9, 10, 12, 15, 16])
TARGET = TransformerConfig(
  vocab_size=V,
  num_layers=3,
  width=32,
  mlp_width=48,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
GEMMA = dataclasses.replace(
  TARGET,
  tied=True,
  windows=(4, None, 4),
  local_rope_theta=100.0,
  qk_norm=True,
  post_norms=True,
  norm_offset=True,
  scale_embedding=True,
  logit_softcap=5.0,
)
# Of T5 1.0, but for a head of its own; the dimension is one of the kernels'.
T5 = dataclasses.replace(
  TARGET,
  head_dim=32,
  num_kv_heads=TARGET.num_heads,
  query_scalar=1.0,
  gated=False,
  activation="relu",
  relative_buckets=4,
  relative_distance=6,
  scale_logits=True,
  encoder_layers=2,
)
CONFIGS = {"llama": TARGET, "gemma": GEMMA, "t5": T5}
_SMALL = dict(width=16, mlp_width=24, num_heads=2, num_kv_heads=1, head_dim=8)
_EVERY = {
  "eagle": dict(head="shared"),
  "eagle3": dict(features=(1, 2, 3)),
  "mtp": dict(head="shared"),
  "prophet": dict(num_layers=2),
  "medusa": dict(num_layers=0),
  "hydra": dict(num_layers=0),
  "recycle": dict(kind="exit", exit_layer=2, feeds_back_hidden=True),
  "head": dict(kind="exit", exit_layer=1, num_layers=0, head="shared"),
  "published_eagle": dict(kind="eagle", head="shared", bias=True),
  "published_eagle3": dict(
    kind="eagle3",
    features=(1, 2, 3),
    embed="own",
    num_layers=2,
    feature_norm="each",
    norm_before_residual=True,
    qk_norm=True,
  ),
  "published_mtp": dict(
    kind="mtp", head="shared", hidden_first=True, feeds_back_norm=True
  ),
  "published_medusa": dict(kind="medusa", num_layers=0, residual_layers=2),
  "published_redrafter": dict(
    kind="redrafter", num_layers=0, width=20, rnn=True
  ),
  "published_mlp": dict(
    kind="mlp_speculator", num_layers=0, width=12, scale_input=True
  ),
}
KINDS = tuple(_EVERY)
PARALLEL = "peagle", "published_peagle"
_EVERY |= {
  "peagle": dict(features=(1, 3), num_layers=2, num_heads=3),
  "published_peagle": dict(
    kind="peagle",
    features=(1, 2, 3),
    num_layers=2,
    feature_norm="joint",
    norm_before_residual=True,
    feeds_back_norm=True,
    mask_token=3,
  ),
}
_BLOCKS = {
  "dflash": {},
  "jetspec": dict(causal=True),
  "dspark": dict(slots="next", successor="markov", confidence=True),
  "windowed": dict(window=3),  # one slot sees the token before the anchor
  "gated": dict(slots="next", successor="gated_markov", mask_token=3),
  "rnn": dict(successor="rnn_markov", causal=True, confidence=True),
  "domino": dict(slots="next", successor="gru", state=6),
  "published_block": dict(
    slots="next",
    successor="gated_markov",
    window=4,
    full_layers=(0,),
    causal_window=True,
    confidence=True,
    mask_token=3,
  ),
  "dflash2": dict(successor="selector", candidates=3, taps=2, group=4),
}
BLOCKS = tuple(_BLOCKS)
for _name, _options in _BLOCKS.items():
  _EVERY[_name] = dict(
    kind="block",
    features=(1, 3),
    levels=3,
    num_layers=2 if _name in ("dflash", "published_block") else 1,
    num_heads=3,  # scores of a block have no cache's shape
    block=BlockConfig(rank=4, **_options),
  )
_EVERY["published_block"]["embed"] = "own"
_EVERY["windowed"]["head_dim"] = 32  # which the C++ kernel takes


def head_config(name: str, vocabulary: int = len(IDS), **changes) -> HeadConfig:
  """Of a name in KINDS, PARALLEL or BLOCKS; `recycle` and `head` are exits."""
  entries = dict(kind=name, vocabulary=vocabulary, **_SMALL)
  if name.startswith("published"):
    entries |= dict(layout="published", width=TARGET.width)
  return HeadConfig(**entries | _EVERY[name] | changes)


def sharpened(weights, by):
  """What begins as the identity, DFlash2's convolutions, does no longer."""

  def sharpen(x):
    if x.ndim < 2:
      return x
    noise = jax.random.normal(jax.random.key(x.size), x.shape)
    return x + 0.5 * noise if x.ndim == 3 or not np.any(x) else by * x

  return jax.tree.map(sharpen, weights)


@functools.cache
def target(name: str = "llama"):
  """(model, its weights), of a name in CONFIGS."""
  params = transformer.init_params(CONFIGS[name], jax.random.key(0))
  return transformer.model(CONFIGS[name]), jax.tree.map(lambda x: 3 * x, params)


def draft_head(
  kind: str, full: bool = False, place=None, config=TARGET, ids=IDS, **changes
) -> draft_heads.DraftHead:
  """Of a target's config; it can draft `ids`, or, full, every token."""
  ids = None if full else ids
  if kind.startswith("published") and "width" not in _EVERY[kind]:
    changes = dict(width=config.width) | changes
  entries = head_config(kind, 0 if full else len(ids), **changes)
  return drafters.LEARNED[entries.kind](entries, config, ids, place)


@functools.cache
def weights(kind: str, full: bool = False):
  """Params.draft."""
  head = draft_head(kind, full)
  net = sharpened(head.init(jax.random.key(1)), 6)
  return draft_heads.weights_of(head, net, target()[1])


L, K = 30, 3
LENGTHS = np.array([1, 2, 5, 9] * 2)
BATCH = len(LENGTHS)
TEMPERATURES = np.repeat([1.0, 0.0], 4)
NEVER = -1  # no token is this one


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
  """For modules that import it: prompts take several chunks of prefill."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kv, "CHUNK", 4)
    yield


def prompts():
  return np.random.default_rng(0).integers(0, V, size=(BATCH, 9))


def arguments(
  name="llama", rows=slice(None), draft=None, temperature=TEMPERATURES
):
  """Of decode.start and decode.generate, after model, drafter and rule."""
  params = Params(target(name)[1], draft)
  positional = params, prompts()[rows], LENGTHS[rows], jax.random.key(0)
  temperature = jnp.asarray(temperature[rows])
  return positional, {
    "max_length": L,
    "sampling": sampling.settings(len(temperature), temperature),
    "index": jnp.arange(BATCH)[rows],
  }


def start(drafter, rule, *args, name="llama", **options):
  """The state after prefill; more arguments are those of `arguments`."""
  positional, options = arguments(name, *args, **options)
  return decode.start(target(name)[0], drafter, rule, *positional, **options)


def speculate(
  drafter,
  rule,
  draft=None,
  temperature=TEMPERATURES,
  end=NEVER,
  most=decode.MAX_ROUNDS,
  name="llama",
):
  """One program for whatever is not the first two."""
  model, params = target(name)
  state = start(drafter, rule, draft=draft, temperature=temperature, name=name)
  ends, params = jnp.array([end], jnp.int32), Params(params, draft)
  return decode.run(model, drafter, rule, params, state, ends, jnp.int32(most))


@functools.cache
def baseline(end=NEVER):
  return texts(
    speculate(decode.NO_DRAFTER, decode.NO_DRAFT_RULE, None, end=end)
  )


def every_block(head, net, target_weights, tokens, output):
  """[levels, B, T, n] logits, as `teacher`: every position is an anchor."""
  size, levels = tokens.shape[1], head.head_config.levels
  anchors = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  context = block_unroll.context_of(head, net, output)
  padded = jnp.pad(tokens, ((0, 0), (0, levels)))
  logits = block_unroll.unroll(
    head, net, target_weights, padded, context, anchors
  ).logits
  return [
    jnp.pad(logits[:, : size - j, j], ((0, 0), (j, 0), (0, 0)))
    for j in range(levels)
  ]


def every_round(head, net, target_weights, tokens, output):
  """The same of a parallel head: every position is a root of all levels."""
  size, levels = tokens.shape[1], K
  rounds = jnp.broadcast_to(jnp.arange(size), tokens.shape)
  slots = mask_slots.behind(rounds, (size,) * (levels - 1), size)
  logits = unroll_slots(head, net, target_weights, tokens, output, slots)
  return [
    jnp.pad(x[:, : size - j], ((0, 0), (j, 0), (0, 0)))
    for j, x in enumerate(logits)
  ]


@functools.cache
def teacher(kind, full=False):
  """(tokens [B, T], draft's weights) -> log-probabilities [K, B, T, V]: level
  j is of what follows each token when the round began j tokens before."""
  model, params = target()
  head = draft_head(kind, full, place=growing)

  @jax.jit
  def distributions(tokens, draft):
    output, _ = model.apply(params, tokens, None, features=head.features)
    target_weights = draft_heads.target_weights_of(Params(params, draft))
    given = draft["net"], target_weights, tokens
    if head.head_config.block:
      logits = every_block(head, *given, output)
    elif head.head_config.parallel:
      logits = every_round(head, *given, output)
    else:
      logits, _ = unroll(head, *given, output, K)
    return jax.nn.log_softmax(draft_heads.spread(head, jnp.stack(logits)))

  return distributions


def differences(kind, full, state, origin=None):
  """{level: [|log-probability handed over - trained on|]} of a chain's text,
  of every token that was compared with a draft token."""
  draft = weights(kind, full)
  trained_on = np.asarray(teacher(kind, full)(state.tokens, draft))
  tokens, handed_over = (
    np.asarray(x) for x in (state.tokens, state.draft_log_probs)
  )
  origin = np.asarray(state.origin) if origin is None else origin
  # Position of the first root.
  first = int(draft_head(kind, full).head_config.skips_first)
  gaps = {}
  for b, (start, stop) in enumerate(zip(LENGTHS, np.asarray(state.length))):
    level = 0
    for p in range(start, stop):
      trained = p - 1 - level >= first
      if trained and origin[b, p] in (ACCEPTED, CORRECTION):
        ours = handed_over[b, p]
        theirs = trained_on[level, b, p - 1, tokens[b, p]]
        gap = 0.0 if ours == theirs else abs(ours - theirs)  # both may be -inf
        gaps.setdefault(level, []).append(gap)
      level = level + 1 if origin[b, p] == ACCEPTED else 0
  return gaps


TABLE = table_model.model(4)
TABLES = Params(
  *(
    table_model.init_params(jax.random.key(seed), TABLE.vocab_size, 1.2)
    for seed in (0, 1)
  )
)


def _of_streams() -> Model:
  """TABLE, and streams to read: the logits, in another order each."""

  def apply(params, tokens, cache, *, features=(), **options):
    output, cache = TABLE.apply(params, tokens, cache, **options)
    streams = tuple(jnp.roll(output.hidden, i, -1) for i in features)
    return output._replace(features=streams), cache

  return TABLE._replace(apply=apply)


STREAMS = _of_streams()


def table_head(kind: str, ids=(), window: int = 0):
  """A head whose target is STREAMS; it can draft `ids`, () for all.

  Args:
    window: of its block, where that is another than the kind's.
  """
  width = TABLE.vocab_size
  config = TransformerConfig(
    vocab_size=width,
    num_layers=3,
    width=width,
    mlp_width=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
  )
  single = kind in BLOCKS or kind in PARALLEL
  changes = {"features": (1,)} if single else {}
  if window:
    block = head_config(kind).block
    changes["block"] = dataclasses.replace(block, window=window)
  ids = np.array(ids)
  return draft_head(kind, not len(ids), config=config, ids=ids, **changes)


@functools.cache
def of_table(kind: str, ids, shape, copies: int = 0, window: int = 0):
  """(drafter, Params) of a `table_head`: the target's hidden states are its
  logits, its embeddings random.

  Args:
    ids: tokens that it can draft, () for all.
    copies: draft tokens of a lookup that goes first, 0 for none.
    window: of `table_head`.
  """
  width, head = TABLE.vocab_size, table_head(kind, ids, window)
  embed = jax.random.normal(jax.random.key(3), (width, width))
  params = TABLES.target | {"embed": {"weight": embed}}
  net = sharpened(head.init(jax.random.key(4)), 3)
  drafter = drafters.from_head(head, STREAMS, shape, max_external_drafts=copies)
  if copies:
    drafter = drafters.fallback(
      drafters.lookup(copies, ngram=2, min_ngram=2), drafter
    )
  return drafter, Params(params, draft_heads.weights_of(head, net, params))


def stumbling(drafter, narrow=False):
  """The same, with rounds that are not drafted.

  Of four rounds the second is undrafted in every row, the fourth in the rows
  whose length is even.

  Args:
    narrow: the target then runs the pending token alone; else the draft tokens
      stand beside it, out of use.
  """
  size = drafter.spec.max_nodes
  widths = tuple(sorted({1, size})) if narrow else (size,)

  def init(params, context, output):
    return drafter.init(params, context, output), jnp.zeros_like(context.length)

  def propose(params, state, context):
    draft_state, turn = state
    draft, draft_state = drafter.propose(params, draft_state, context)
    stumbles = turn % 4 == 1
    stumbles |= (turn % 4 == 3) & (context.length % 2 == 0)
    count = jnp.where(stumbles, 1, size)
    return draft._replace(count=count), (draft_state, turn)

  def update(params, state, *rest):
    return drafter.update(params, state[0], *rest), state[1] + 1

  spec = drafter.spec._replace(widths=widths)
  return drafter._replace(spec=spec, init=init, propose=propose, update=update)
