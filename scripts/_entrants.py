"""Drafters of one target by name, for a comparison on equal terms."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import jax
from absl import flags

from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import learned as saved
from specdec.checkpoints import shipped
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve, size
from specdec.models import layouts, transformer
from specdec.roofline.cost import pass_bound
from specdec.training import saving
from specdec.types import Drafter, Params, Skip

FLAGS = flags.FLAGS
HELP = (
  "lookup; model:NAME, an independent draft; early_exit:E, the target's own "
  "first E layers, untrained; skip:FILE, the target without the sublayers that "
  "choose_layers.py wrote there, or skip, the shipped ones; a file of "
  "train_drafter.py or the name of a shipped drafter"
)


class Candidate(NamedTuple):
  """One drafter, ready to be measured."""

  name: str
  kind: str
  make: Callable[[draft_shape.DraftShape | None, int], Drafter]  # (shape, k)
  params: Params
  weights: int  # of its own
  step_bytes: float  # weights that a draft token but the first of a round reads
  update_bytes: float = (
    0.0  # weights read once a round, behind the accept_result
  )
  most_levels: int | None = None  # None: any
  chains_only: bool = False

  @property
  def checksum(self) -> int:
    """Of the drafter's weights, 0 without any."""
    return saving.checksum(self.params.draft)


def load(
  names: list[str], target: checkpoints.Checkpoint
) -> tuple[checkpoints.Checkpoint, list[Candidate]]:
  """The target as it decodes, and the drafters.

  Raises:
    ValueError, FileNotFoundError: a name means nothing, or a drafter is of
      another target.
  """
  found = [(name, _read(name, target)) for name in names]
  packed = target.packed()
  model = transformer.model(packed.config)
  return packed, [
    _candidate(name, what, packed, model, net) for name, (what, net) in found
  ]


def _read(name: str, target):
  """What a name stands for and its weights, the target not yet packed."""
  kind, _, rest = name.partition(":")
  if name == "lookup":
    return None, None
  if kind == "model":
    draft = checkpoints.load(fetch(rest), FLAGS.dtype)
    checkpoints.check_vocabulary(
      target.config.vocab_size,
      draft.config.vocab_size,
      target.tokenizer,
      draft.tokenizer,
    )
    return draft.config, draft.packed().params
  if kind == "early_exit":
    if not rest.isdecimal():
      raise ValueError(f"{name!r}: give early_exit:E")
    return int(rest), None
  if kind == "skip":
    return _skip_of(pathlib.Path(rest) if rest else shipped.SKIP), None
  found = saved.load(shipped.drafter(name), target)
  draft_head = found.draft_head(target.config)
  weights = draft_heads.weights_of(draft_head, found.net, target.params)
  return found, layouts.pack(jax.tree.map(lambda x: x, weights))


def _skip_of(path: pathlib.Path) -> Skip:
  """What choose_layers.py wrote; its threshold is left out."""
  try:
    said = json.loads(path.read_text(encoding="utf-8"))
    return Skip(*(tuple(said[f"skip_{x}"]) for x in Skip._fields))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path} is no file of choose_layers: {error}") from error


def _candidate(name, what, target, model, net) -> Candidate:
  params, config = Params(target.params, net), target.config
  size_of = 4 if config.dtype == "float32" else 2

  def first_layers(count: int) -> float:
    """Bytes of so many of the target's layers, without embedding and head."""
    layers = dataclasses.replace(config, num_layers=count, windows=())
    none = config.vocab_size * config.width * (1 if config.tied else 2)
    return size_of * (layers.num_parameters - none)

  head = size_of * config.vocab_size * config.width
  if name == "lookup":

    def look_up(shape, k):
      return drafters.lookup(k, ngram=FLAGS.ngram, min_ngram=FLAGS.min_ngram)

    return Candidate(name, name, look_up, params, 0, 0.0, chains_only=True)
  if isinstance(what, int):

    def exit_early(shape, k):
      shape = shape or draft_shape.chain(k)
      return drafters.early_exit(model, what, shape=shape)

    read = first_layers(what) + head
    return Candidate(name, "early_exit", exit_early, params, 0, read)
  if isinstance(what, Skip):

    def skipping(shape, k):
      shape = shape or draft_shape.chain(k)
      return drafters.layer_skip(model, what, shape=shape)

    mlp = size_of * 3 * config.width * config.mlp_width * len(what.mlp)
    attention = first_layers(1) - size_of * 3 * config.width * config.mlp_width
    read = first_layers(config.num_layers) + head
    read -= mlp + attention * len(what.attention)
    return Candidate(name, "layer_skip", skipping, params, 0, read)
  if not isinstance(what, saved.Learned):
    draft = transformer.model(what)

    def independent(shape, k):
      return drafters.model(draft, shape=shape or draft_shape.chain(k))

    read = pass_bound(what, 1, 1, 0).bytes
    return Candidate(
      name, "model", independent, params, what.num_parameters, read
    )
  draft_head = what.draft_head(config)

  def learned(shape, k):
    return serve.drafter(draft_head, model, shape or draft_shape.chain(k))

  read = 4 * size.step_weights(draft_head, config)
  if what.head_config.exit_layer:
    read += first_layers(what.head_config.exit_layer)
  return Candidate(
    name,
    what.head_config.kind,
    learned,
    params,
    size.num_weights(what.net),
    read,
    4 * what.head_config.layers.num_parameters
    if draft_head.has_kv_cache
    else 0.0,
    what.head_config.most_levels,
  )
