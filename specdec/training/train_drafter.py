"""Trains a draft head on the hidden states of a frozen target.

Invariant: everything that can be refused is refused before the run's folder is
written; the weights that are evaluated are those that are saved.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

from specdec import checkpoints, drafters
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import vocabulary
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, drafting, evaluate, hidden, run, samples
from specdec.training.setup import HeadSetup
from specdec.utils import files, remote, terminal


def train(setup: HeadSetup, folder: Path) -> None:
  """Trains, resuming the run if `folder` has a part of it.

  Raises:
    ValueError: the config, the texts and the target do not go together, or the
      folder holds another run.
    FileNotFoundError: a text or the target is not there.
  """
  options, head_config = setup.options, setup.head_config
  remote.check_local("cache", setup.cache or "")
  source = fetch(setup.target)
  config = checkpoints.inspect(source)
  if config.encoder_layers:
    raise ValueError(
      f"target {setup.target} is an encoder-decoder; draft heads are trained "
      "on decoders alone"
    )
  head_config.check(config)
  target = checkpoints.load(source)
  if target.tokenizer is None:
    raise ValueError(f"target {setup.target} brings no tokenizer")
  packed, held_out = texts = data.load(
    setup.data, setup.held_out, options, target.tokenizer
  )
  model = transformer.model(target.config)
  fingerprint = saved.fingerprint(target)
  settings = run.settings(setup, texts) | {"fingerprint": fingerprint}
  if setup.samples and setup.samples.count:
    run.claim(folder, settings)
  packed = samples.of_target(
    setup.samples, packed, model, target.params, options, folder
  )
  start = setup.start and saved.load(setup.start, target)
  if start:
    files.check_same(
      "start is of another head config",
      dataclasses.asdict(start.head_config),
      dataclasses.asdict(head_config),
    )
    ids = start.ids
  else:
    ids, _ = vocabulary.most_frequent(
      packed.rows, head_config.vocabulary, target.config.vocab_size
    )
  if ids is not None:
    terminal.report(
      f"vocabulary: {len(ids):,} of {target.config.vocab_size:,} tokens, "
      f"{np.isin(packed.rows, ids).mean():.1%} of the text",
      file=sys.stderr,
    )
  serving, unrolled = (
    drafters.LEARNED[head_config.kind](head_config, target.config, ids, place)
    for place in (None, growing)
  )
  params = start.net if start else serving.init(jax.random.key(options.seed))
  objective, evaluated = (
    drafting.objective(unrolled, model, setup.loss, measure, options.seed)
    for measure in (False, True)
  )
  measure = evaluate.head_by_decoding(model, serving, held_out, setup.decoding)
  run.claim(folder, settings)
  size = sum(x.size for x in jax.tree.leaves(params)) / 1e6
  run.announce(f"{head_config.kind}, {size:.2f} M parameters", options, packed)
  if setup.cache:
    packed = hidden.Cached(
      packed,
      model,
      target.params,
      serving.features,
      Path(setup.cache),
      fingerprint,
    )
  if head_config.block:  # its anchors are drawn
    packed = data.Numbered(packed)
  run.train(
    params,
    target.params,
    objective,
    packed,
    held_out,
    options,
    folder,
    export=lambda net, name: saved.save(
      folder / f"{name}{saved.SUFFIX}", head_config, ids, net, fingerprint
    ),
    decode=lambda net: measure(target.params, jax.tree.map(saved.rounded, net)),
    evaluated=evaluated,
  )
