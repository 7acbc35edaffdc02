"""Drafters that are models of their own: read, held and fitted to a target."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from specdec import checkpoints, drafters
from specdec.benchmark.target import (
  PRESET,
  Target,
  Weighted,
  check_kv,
  config_of,
  held_name,
  source_of,
  with_cache,
)
from specdec.checkpoints import Checkpoint
from specdec.checkpoints.common_tokens import common_tokens
from specdec.compiled import lowering
from specdec.draft_shape import DraftShape
from specdec.drafters.token_map import MappedWeights, TokenMap, in_order
from specdec.models import layouts, transformer, weight_formats
from specdec.roofline import drafter_cost
from specdec.types import Model
from specdec.utils import terminal


def model(
  name: str,
  target: Target,
  shape: DraftShape,
  weights: str | None = None,
  kv: str | None = None,
) -> Weighted:
  """Makes the drafter model(NAME)."""
  draft, model = _draft_of(name, target, weights, kv)
  drafter = drafters.model(model, shape=shape)
  drafter = drafter._replace(cost=drafter_cost.model(draft.config))
  return Weighted(drafter, draft.params)


def pard(
  name: str,
  target: Target,
  shape: DraftShape,
  mask_token: int | None = None,
  weights: str | None = None,
  kv: str | None = None,
) -> Weighted:
  """Makes the drafter pard(NAME)."""
  draft, model = _draft_of(name, target, weights, kv)
  if mask_token is None:
    mask_token = draft.config.mask_token
  if mask_token is None:
    raise ValueError(
      f"{name} names no pard_token in its config.json: it was not taught to "
      f"draft from masks; take model({name}), or pard({name}, mask_token=ID)"
    )
  drafter = drafters.pard(model, mask_token, shape=shape)
  drafter = drafter._replace(cost=drafter_cost.pard(draft.config))
  return Weighted(drafter, draft.params)


def _draft_of(
  name: str, target: Target, weights: str | None, kv: str | None
) -> tuple[Checkpoint, Model]:
  """Returns a draft model, loaded once."""
  check_kv(kv)
  drafts, key = target.drafts, held_name(name, weights, kv)
  if key not in drafts:
    draft = _load_draft(name, target, weights)
    config = with_cache(draft.config, kv)
    drafts[key] = dataclasses.replace(draft, config=config)
  draft = drafts[key]
  return draft, transformer.model(draft.config, target.draft_place)


def _load_draft(name: str, target: Target, held: str | None) -> Checkpoint:
  source, place = source_of(name), target.draft_place
  size = target.checkpoint.config.vocab_size
  config = config_of(source, target.dtype, held)
  if target.random_weights:
    config = dataclasses.replace(config, vocab_size=size)
  _check_vocabulary(name, size, config.vocab_size)
  if target.abstract:
    weights = lowering.weights(config, place)
    return Checkpoint(config, weights, None, (), str(source))
  if target.random_weights:
    seed = target.seed + 1
    draft = checkpoints.random_checkpoint(config, seed, str(source), place)
  else:
    form = weight_formats.parse(held)
    draft = checkpoints.load(source, target.dtype, place, form)
    tokenizers = target.checkpoint.tokenizer, draft.tokenizer
    _check_vocabulary(name, size, config.vocab_size, *tokenizers)
  return draft if target.places else draft.packed()


def _check_vocabulary(name: str, *args) -> None:
  """Checks that vocabularies agree, and names what drafts with another."""
  try:
    checkpoints.check_vocabulary(*args)
  except ValueError as error:
    raise ValueError(
      f"{error}; translated({name}) drafts with another tokenizer"
    ) from None


def translated(
  name: str,
  target: Target,
  shape: DraftShape,
  weights: str | None = None,
  room: int = 2,
) -> Weighted:
  """Makes the drafter translated(NAME)."""
  shape_alone = target.abstract and name.startswith(PRESET)
  if target.random_weights and not shape_alone:
    raise ValueError(
      f"translated({name}) compares tokenizers, and random weights have none"
    )
  if target.places:
    raise ValueError(
      f"translated({name}) drafts on one device, and there is a mesh"
    )
  source, form = source_of(name), weight_formats.parse(weights)
  config = config_of(source, target.dtype, weights)
  sizes = target.checkpoint.config.vocab_size, config.vocab_size
  sources = str(source_of(target.checkpoint.source)), str(source)
  if any(one.startswith(PRESET) for one in sources):  # of no tokenizer: a cost
    size = sizes[0]
    shapes = (size,), (size + 1,), (4 * size,), (0,), (size,)
    token_map = TokenMap(*(np.zeros(one, np.int32) for one in shapes))
  else:
    token_map = _token_map(*sources, *sizes)
  if target.abstract:
    whole = lowering.weights(config, None)
    config, *parts = in_order(config, whole, token_map)
  else:
    drafts, key = target.drafts, f"translated {held_name(name, weights)}"
    if key not in drafts:
      draft = checkpoints.load(source, target.dtype, weights=form)
      config, params, token_map = in_order(config, draft.params, token_map)
      token_map = jax.tree.map(jnp.asarray, token_map)
      params = MappedWeights(layouts.pack(params), token_map)
      drafts[key] = dataclasses.replace(draft, config=config, params=params)
    config, parts = drafts[key].config, drafts[key].params
  drafter = drafters.translated(
    transformer.model(config), shape=shape, room=room
  )
  params = MappedWeights(*parts)
  cost = drafter_cost.translated(config, sizes[0], room, params.token_map)
  return Weighted(drafter._replace(cost=cost), params)


@functools.lru_cache(maxsize=8)
def _token_map(
  target: str, draft: str, target_size: int, draft_size: int
) -> TokenMap:
  """Compares the tokenizers of two models, and says what they share."""
  common = common_tokens(
    *map(checkpoints.load_tokenizer, (target, draft)), target_size, draft_size
  )
  terminal.report(f"{draft}: {common}", file=sys.stderr)
  return common.token_map
