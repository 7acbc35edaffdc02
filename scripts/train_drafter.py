"""Trains a drafter that reads the target's hidden states; the target is frozen.

  python scripts/train_drafter.py --config=configs/train/drafter.py:prophet \
    --folder=runs/prophet
  python scripts/train_drafter.py ... --config.options.steps=50  # any entry
  python scripts/generate.py --learned=runs/prophet/best.safetensors

The same command again goes on where the run was stopped or killed, to the same
weights bit for bit. The folder gets best.safetensors and last.safetensors (the
drafter: head config, vocabulary, weights), metrics.jsonl, TensorBoard's files
under tensorboard/ and the resumable state under checkpoints/. At every
evaluation the drafter decodes held-out prompts with the real loop and rule:
that is what it is worth; acceptance_j and agreement_j beside it are after the
text's own words.
"""

import dataclasses
import sys
from pathlib import Path

import _config
import _main
import _training
import jax
import numpy as np
from absl import flags

from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve, vocabulary
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import drafting, hidden, saving
from specdec.training.options import FREE, Options
from specdec.training.run import train
from specdec.types import Params
from specdec.utils import files, terminal

_config.define(
  "config",
  "File whose get_config() says what to train, on what, how.",
  "train/*.py",
)
flags.DEFINE_string("folder", None, "Folder of the run.")
flags.mark_flag_as_required("config")
flags.mark_flag_as_required("folder")
FLAGS = flags.FLAGS
# Entries of a config, and what each of them must hold.
REQUIRED = {
  "target": (),
  "data": (),
  "held_out": (),
  "head_config": ("kind",),
  "loss": (),
  "options": (),
  "decoding": _training.DECODING,
}
OPTIONAL = {
  "samples": _training.SAMPLES,
  "start": (),
  "cache": (),
}


def read_config() -> tuple[dict, HeadConfig, drafting.Loss, Options]:
  """The config as plain dictionaries, its entries checked."""
  config = FLAGS.config.to_dict()
  _training.check_entries(config, REQUIRED, OPTIONAL)
  head_config = dict(config["head_config"])
  head_config["features"] = tuple(head_config.get("features", ()))
  return (
    config,
    HeadConfig(**head_config),
    drafting.Loss(**config["loss"]),
    Options(**config["options"]),
  )


def read_start(config, head_config: HeadConfig, target) -> saved.Learned | None:
  """The drafter that `start` names: its weights and what it may draft."""
  if not config.get("start"):
    return None
  start = saved.load(config["start"], target)
  if start.head_config != head_config:
    found = files.differences(
      dataclasses.asdict(start.head_config), dataclasses.asdict(head_config)
    )
    raise ValueError(f"start is of another head config: {'; '.join(found)}")
  return start


def choose_vocabulary(head_config: HeadConfig, rows, target, start):
  """What the drafter may draft: what it could before, or the tokens that
  are
  most frequent in the texts that it is trained on."""
  size = target.config.vocab_size
  if start:
    ids = start.ids
    part = 1.0 if ids is None else float(np.isin(rows, ids).mean())
  else:
    ids, part = vocabulary.most_frequent(rows, head_config.vocabulary, size)
  if ids is not None:
    terminal.report(
      f"vocabulary: {len(ids):,} of {size:,} tokens, {part:.1%} of the text",
      file=sys.stderr,
    )
  return ids


def run() -> None:
  """Checks everything, then trains."""
  config, head_config, loss, options = read_config()
  _main.take_folder("--folder", FLAGS.folder)
  source = fetch(config["target"])
  head_config.check(checkpoints.inspect(source))
  target = checkpoints.load(source)
  if target.tokenizer is None:
    raise ValueError(f"target {config['target']} brings no tokenizer")
  packed, held_out = _training.load_data(config, options, target.tokenizer)
  model, folder = transformer.model(target.config), Path(FLAGS.folder)
  fingerprint = saved.fingerprint(target)
  settings = config | dict(
    head_config=dataclasses.asdict(head_config),
    loss=dataclasses.asdict(loss),
    options=dataclasses.asdict(options),
    fingerprint=fingerprint,
    checksums=dict(
      data=saving.checksum(packed.rows),
      held_out=saving.checksum(held_out.rows),
    ),
  )
  if (config.get("samples") or {}).get("count"):
    files.claim(folder, settings, FREE)
    packed = _training.sample(
      config["samples"], packed, model, target.params, options, folder
    )
  start = read_start(config, head_config, target)
  ids = choose_vocabulary(head_config, packed.rows, target, start)
  make = drafters.LEARNED[head_config.kind]
  serving, growing_head = (
    make(head_config, target.config, ids, place) for place in (None, growing)
  )
  params = start.net if start else serving.init(jax.random.key(options.seed))
  aim, evaluated = (
    drafting.objective(growing_head, model, loss, measure)
    for measure in (False, True)
  )
  decoding = config["decoding"]
  drafter = serve.drafter(serving, model, draft_shape.chain(decoding["k"]))
  judge = _training.judge(decoding, held_out, model, drafter)

  def decode(net):
    net = jax.tree.map(saved.rounded, net)  # what is evaluated is what is kept
    draft = draft_heads.weights_of(serving, net, target.params)
    return judge(Params(target.params, draft))

  files.claim(folder, settings, FREE)  # nothing is refused behind it
  size = sum(x.size for x in jax.tree.leaves(params))
  size = f"{head_config.kind}, {size / 1e6:.2f} M parameters"
  _training.say_size("train_drafter", size, options, packed)
  if config.get("cache"):
    packed = hidden.Cached(
      packed,
      model,
      target.params,
      serving.features,
      Path(config["cache"]),
      fingerprint,
    )
  train(
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


main = _main.main_of(
  "train_drafter",
  run,
  also=(TypeError,),  # an entry of HeadConfig, Loss or Options that is none
  interrupted="stopped; the same command goes on from the last checkpoint",
)

if __name__ == "__main__":
  _main.start(main)
