"""Trains a draft head on the hidden states of a frozen target.

Invariant: everything that can be refused is refused before the run's folder is
written; the weights that are evaluated are those that are saved.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

from specdec import checkpoints
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import draft_head, vocabulary
from specdec.models import transformer
from specdec.training import (
  data,
  drafting,
  evaluate,
  hidden,
  placing,
  run,
  samples,
)
from specdec.training.setup import HeadSetup
from specdec.utils import remote, run_folder, terminal


def train(
  setup: HeadSetup,
  folder: Path,
  mesh: str | None = None,
  draft_ways: int | None = None,
) -> None:
  """Trains, resuming the run if `folder` has a part of it, on whatever mesh.

  Args:
    mesh: 'data:N,model:M' (sharding.parse); None: one copy of all weights on
      each device.
    draft_ways: how many devices of the M share the head's weights, default M.

  Raises:
    ValueError: the config, the texts and the target do not go together, or the
      folder holds another run.
    FileNotFoundError: a text or the target is not there.
    MemoryError: it would not fit.
  """
  options, head_config = setup.options, setup.head_config
  remote.check_local("cache", setup.cache or "")
  if setup.cache and jax.process_count() > 1:
    raise ValueError(
      f"cache = {setup.cache}: hidden states are cached by one process, and "
      f"there are {jax.process_count()}; leave it out"
    )
  source = fetch(setup.target)
  config = checkpoints.inspect(source, options.dtype)
  if config.encoder_layers:
    raise ValueError(
      f"target {setup.target} is an encoder-decoder; draft heads are trained "
      "on decoders alone"
    )
  head_config.check(config)
  where = placing.places(mesh, config, head_config, options, draft_ways)
  plan = placing.plan(head_config, config, where)
  placing.check_memory(plan, where.target)
  target = checkpoints.load(source, options.dtype, where.target)
  if target.tokenizer is None:
    raise ValueError(f"target {setup.target} brings no tokenizer")
  start = setup.start and saved.load(saved.resolve(setup.start), target)
  if start:
    run_folder.check_same(
      "start is of another head config",
      dataclasses.asdict(start.head_config),
      dataclasses.asdict(head_config),
    )
  packed, held_out = texts = data.load(
    setup.data, setup.held_out, options, target.tokenizer
  )
  evaluate.check_prompts(held_out, setup.decoding)
  samples.check(setup.samples, packed)
  model = transformer.model(target.config, where.target)
  fingerprint = saved.fingerprint(target)
  begun = {"start": (start.net, start.ids)} if start else {}
  settings = run.settings(setup, texts, **begun)
  settings |= {"fingerprint": fingerprint}
  drawn = bool(setup.samples and setup.samples.count)
  if setup.cache:
    rows = None if drawn else packed.rows
    held = target.config.dtype
    states = fingerprint, head_config.streams, rows, held
    hidden.check(Path(setup.cache), *states)
  if drawn:
    run.claim(folder, settings)
  packed = samples.of_target(
    setup.samples, packed, model, target.params, options, folder
  )
  if start:
    ids = start.ids
  else:
    ids = vocabulary.most_frequent(
      packed.rows, head_config.vocabulary, target.config.vocab_size
    )
  if ids is not None:
    terminal.report(
      f"vocabulary: {len(ids):,} of {target.config.vocab_size:,} tokens, "
      f"{np.isin(packed.rows, ids).mean():.1%} of the text",
      file=sys.stderr,
    )
  serving, unrolled = placing.heads(
    head_config, target.config, ids, where.draft
  )
  params = start.net if start else serving.init(jax.random.key(options.seed))
  params = placing.put(unrolled, params, where.draft)
  objective, evaluated = (
    drafting.objective(
      unrolled, model, setup.loss, measure, options.seed, where.draft
    )
    for measure in (False, True)
  )
  measure = evaluate.head_by_decoding(
    model, serving, held_out, setup.decoding, where.target
  )
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
  if head_config.block or head_config.parallel:  # where they begin is drawn
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
    decode=lambda net: measure(
      target.params,
      saved.rounded(placing.gathered(net, where.draft)),
    ),
    where=where.draft and draft_head.shardings(unrolled, params, where.draft),
    evaluated=evaluated,
  )
