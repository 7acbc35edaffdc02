"""Trains a draft head on the hidden states of a frozen target.

Invariant: everything that can be refused is refused before the run's folder is
written; the weights that are evaluated are those that are saved.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import Checkpoint
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.checkpoints.learned import Learned
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve, vocabulary
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import (
  data,
  drafting,
  evaluate,
  hidden,
  run,
  samples,
  saving,
)
from specdec.training.options import FREE
from specdec.training.setup import HeadSetup
from specdec.types import Params
from specdec.utils import files, terminal


def train(setup: HeadSetup, folder: Path) -> None:
  """Trains, resuming the run if `folder` has a part of it.

  Raises:
    ValueError: the config, the texts and the target do not go together, or the
      folder holds another run.
    FileNotFoundError: a text or the target is not there.
  """
  options, head_config = setup.options, setup.head_config
  source = fetch(setup.target)
  head_config.check(checkpoints.inspect(source))
  target = checkpoints.load(source)
  if target.tokenizer is None:
    raise ValueError(f"target {setup.target} brings no tokenizer")
  packed, held_out = data.load(
    setup.data, setup.held_out, options, target.tokenizer
  )
  model, fingerprint = (
    transformer.model(target.config),
    saved.fingerprint(target),
  )
  settings = dataclasses.asdict(setup) | {
    "fingerprint": fingerprint,
    "checksums": {
      "data": saving.checksum(packed.rows),
      "held_out": saving.checksum(held_out.rows),
    },
  }
  if setup.samples and setup.samples.count:
    files.claim(folder, settings, FREE)
    packed = samples.of_target(
      setup.samples, packed, model, target.params, options, folder
    )
  start = _start(setup, target)
  ids = _vocabulary(setup, packed, target, start)
  make_head = drafters.LEARNED[head_config.kind]
  serving, unrolled = (
    make_head(head_config, target.config, ids, place)
    for place in (None, growing)
  )
  params = start.net if start else serving.init(jax.random.key(options.seed))
  aim, evaluated = (
    drafting.objective(unrolled, model, setup.loss, measure)
    for measure in (False, True)
  )
  drafter = serve.drafter(serving, model, draft_shape.chain(setup.decoding.k))
  measure = evaluate.acceptance_by_decoding(
    model, drafter, held_out, setup.decoding
  )

  def decode(net):
    net = jax.tree.map(saved.rounded, net)
    weights = draft_heads.weights_of(serving, net, target.params)
    return measure(Params(target.params, weights))

  files.claim(folder, settings, FREE)
  size = sum(x.size for x in jax.tree.leaves(params))
  size = f"{head_config.kind}, {size / 1e6:.2f} M parameters"
  run.announce(size, options, packed)
  if setup.cache:
    packed = hidden.Cached(
      packed,
      model,
      target.params,
      serving.features,
      Path(setup.cache),
      fingerprint,
    )
  run.train(
    params,
    target.params,
    aim,
    packed,
    held_out,
    options,
    folder,
    export=lambda net, name: saved.save(
      folder / f"{name}{saved.SUFFIX}", head_config, ids, net, fingerprint
    ),
    decode=decode,
    evaluated=evaluated,
  )


def _start(setup: HeadSetup, target: Checkpoint) -> Learned | None:
  """Loads the drafter that `start` names: weights and vocabulary."""
  if not setup.start:
    return None
  start = saved.load(setup.start, target)
  files.check_same(
    "start is of another head config",
    dataclasses.asdict(start.head_config),
    dataclasses.asdict(setup.head_config),
  )
  return start


def _vocabulary(
  setup: HeadSetup,
  packed: data.Sequences,
  target: Checkpoint,
  start: Learned | None,
) -> np.ndarray | None:
  """Returns the ids that are drafted, None for all.

  They are those of `start`, else the most frequent of the training text.
  """
  vocab_size = target.config.vocab_size
  if start is None:
    ids, share = vocabulary.most_frequent(
      packed.rows, setup.head_config.vocabulary, vocab_size
    )
  else:
    ids = start.ids
    share = 1.0 if ids is None else float(np.isin(packed.rows, ids).mean())
  if ids is not None:
    terminal.report(
      f"vocabulary: {len(ids):,} of {vocab_size:,} tokens, {share:.1%} of the "
      "text",
      file=sys.stderr,
    )
  return ids
