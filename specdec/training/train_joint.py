"""Trains a target from scratch, with or without an auxiliary loss.

Invariant: all kinds of auxiliary loss see the same texts in the same order, and
the target's initial weights depend on the seed alone.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import learned as saved
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve, vocabulary
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, evaluate, joint, run, saving
from specdec.training.objective import Objective
from specdec.training.options import FREE
from specdec.training.setup import JointSetup
from specdec.types import Params, PyTree
from specdec.utils import files

DRAFTER = f"drafter{saved.SUFFIX}"  # its file, in the target's folder


class _Auxiliary(NamedTuple):
  """What an auxiliary loss brings."""

  objective: Objective
  evaluated: Objective
  decode: Callable[[PyTree], dict] | None = None  # measures of weights
  net: PyTree | None = None  # initial weights of the drafter
  ids: np.ndarray | None = None  # that it drafts; None for all


def train(setup: JointSetup, folder: Path) -> None:
  """Trains, resuming the run if `folder` has a part of it.

  Raises:
    ValueError: the config and the texts do not go together, or the folder holds
      another run.
    FileNotFoundError: a text or the tokenizer is not there.
  """
  config, options = setup.model, setup.options
  tokenizer = data.load_tokenizer(setup.tokenizer, config.vocab_size)
  packed, held_out = data.load(setup.data, setup.held_out, options, tokenizer)
  checksums = {
    "data": saving.checksum(packed.rows),
    "held_out": saving.checksum(held_out.rows),
  }
  target = checkpoints.random_checkpoint(config, options.seed).params
  params = {"target": target}
  size = f"{setup.kind}, {config.num_parameters / 1e6:.2f} M parameters"
  if setup.head_config:
    auxiliary = _with_drafter(setup, packed, held_out)
    params["drafter"] = auxiliary.net
    net_size = sum(x.size for x in jax.tree.leaves(auxiliary.net))
    size += f" and {net_size / 1e6:.2f} M of the drafter"
  elif setup.layer_skip:
    auxiliary = _with_exits(setup, held_out)
    packed = data.Numbered(packed)
  else:
    baseline = joint.target_only(transformer.model(config))
    auxiliary = _Auxiliary(baseline, baseline)
  settings = dataclasses.asdict(setup) | {
    "kind": setup.kind,
    "checksums": checksums | {"first_weights": saving.checksum(target)},
  }
  files.claim(folder, settings, FREE)

  def export(weights, name):
    def write_drafter(scratch):  # which is for these weights and no others
      fingerprint = saved.fingerprint(checkpoints.load(scratch))
      saved.save(
        scratch / DRAFTER,
        setup.head_config,
        auxiliary.ids,
        weights["drafter"],
        fingerprint,
        "float32",
      )

    extra = write_drafter if setup.head_config else None
    path = folder / name
    saving.export_model(path, weights["target"], config, tokenizer, extra)

  run.announce(size, options, packed)
  run.train(
    params,
    None,
    auxiliary.objective,
    packed,
    held_out,
    options,
    folder,
    export=export,
    decode=auxiliary.decode,
    evaluated=joint.with_target_loss(auxiliary.evaluated),
  )


def _with_drafter(
  setup: JointSetup, packed: data.Sequences, held_out: data.Sequences
) -> _Auxiliary:
  """Builds the auxiliary loss of a draft head."""
  model, head_config = transformer.model(setup.model), setup.head_config
  ids, _ = vocabulary.most_frequent(
    packed.rows, head_config.vocabulary, setup.model.vocab_size
  )
  make_head = drafters.LEARNED[head_config.kind]
  serving, unrolled = (
    make_head(head_config, setup.model, ids, place) for place in (None, growing)
  )
  drafter = serve.drafter(serving, model, draft_shape.chain(setup.decoding.k))
  measure = evaluate.acceptance_by_decoding(
    model, drafter, held_out, setup.decoding
  )

  def decode(weights):
    target, net = weights["target"], weights["drafter"]
    return measure(Params(target, draft_heads.weights_of(serving, net, target)))

  objective, evaluated = (
    joint.with_drafter(model, unrolled, setup.loss, measured)
    for measured in (False, True)
  )
  net = serving.init(jax.random.key(setup.options.seed))
  return _Auxiliary(objective, evaluated, decode, net, ids)


def _with_exits(setup: JointSetup, held_out: data.Sequences) -> _Auxiliary:
  """Builds the auxiliary loss of LayerSkip."""
  model, decoding = transformer.model(setup.model), setup.decoding
  count, options = setup.model.num_layers, setup.options
  objective = joint.layer_skip(
    model, count, setup.layer_skip, options.steps, options.seed
  )
  drafter = drafters.early_exit(model, decoding.exit_layer, decoding.k)
  measure = evaluate.acceptance_by_decoding(model, drafter, held_out, decoding)
  return _Auxiliary(
    objective,
    joint.exit_losses(model, count),
    lambda weights: measure(Params(weights["target"])),
  )
