"""Trains a language model, or distils a draft from its target.

  python scripts/train.py --config=configs/train/target.py --folder=runs/target
  python scripts/train.py --config=configs/train/draft.py --folder=runs/draft
  python scripts/train.py ... --config.options.steps=50   # any entry, by name

The same command again goes on where the run was stopped or killed, to the same
weights bit for bit. The folder gets best/ and last/ (checkpoints that every
script here and transformers load), metrics.jsonl, TensorBoard's files under
tensorboard/ and the resumable state under checkpoints/. A draft is evaluated,
at every evaluation, by decoding with its target.
"""

import dataclasses
import os
import sys
from pathlib import Path

import _config
import _main
import _mesh
import _training
import jax.numpy as jnp
from absl import flags

from specdec import checkpoints, drafters
from specdec.checkpoints.fetch import fetch
from specdec.compiled import memory_plan
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.models.config import TransformerConfig
from specdec.training import loop, objective, saving, speed
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
flags.DEFINE_integer(
  "time_steps", 0, "Time so many steps beside a matrix product, and stop there."
)
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(_mesh)
FLAGS = flags.FLAGS
# Entries of a config, and what each of them must hold.
REQUIRED = dict.fromkeys(
  ("tokenizer", "data", "held_out", "model", "options"), ()
)
OPTIONAL = {
  "start": (),
  "target": (),
  "loss": (),
  "samples": _training.SAMPLES,
  "decoding": _training.DECODING,
}


def read_config():
  """The config as plain dictionaries, its entries checked."""
  config = FLAGS.config.to_dict()
  required = dict(REQUIRED)
  if config.get("target"):
    required |= {name: OPTIONAL[name] for name in ("loss", "decoding")}
  _training.check_entries(config, required, OPTIONAL)
  return config, _training.shape_of(config), Options(**config["options"])


def find_places(config, model: TransformerConfig, options: Options):
  """Where (the model, the target it is distilled from) lie, or None, None."""
  if not config.get("target"):
    places = _mesh.places(model, None)
    found = (places and places.target), None
  else:
    target = checkpoints.inspect(fetch(config["target"]))
    places = _mesh.places(target, model)
    found = (places[1], places[0]) if places else (None, None)
  piece = options.batch // options.accumulate
  if places and piece % places.target.ways("rows"):
    raise ValueError(
      f"--mesh={FLAGS.mesh} does not divide the {piece} sequences that are "
      "computed at once (options.batch / options.accumulate)"
    )
  plan = memory_plan.training(
    model, target if config.get("target") else None, *found
  )
  terminal.report(
    f"train: memory on each device: {plan} and activations", file=sys.stderr
  )
  memory_plan.check(plan, found[0])
  return found


def load_target(config, model: TransformerConfig, tokenizer, place):
  """The checkpoint to distil from, or None; its vocabulary is compared."""
  if not config.get("target"):
    if config.get("loss", "cross_entropy") != "cross_entropy":
      raise ValueError(f"loss = {config['loss']!r} needs a target")
    return None
  target = checkpoints.load(fetch(config["target"]), place=place)
  checkpoints.check_vocabulary(
    target.config.vocab_size, model.vocab_size, target.tokenizer, tokenizer
  )
  return target


def first_weights(config, shape: TransformerConfig, seed: int, place):
  """Random weights, or those of the checkpoint that `start` names."""
  if not config.get("start"):
    return checkpoints.random_checkpoint(shape, seed, place=place).params
  start = checkpoints.load(fetch(config["start"]), place=place)
  if start.config != shape:
    found = files.differences(
      dataclasses.asdict(start.config), dataclasses.asdict(shape)
    )
    raise ValueError(f"start is of another shape: {'; '.join(found)}")
  return start.params


def time_steps(params, frozen, aim, packed, shape, options: Options) -> None:
  """Prints how fast a step is."""
  optimizer = loop.make_optimizer(options)
  step = loop.make_step(aim, optimizer, options)
  found = speed.measure(
    step,
    loop.init(params, optimizer),
    frozen,
    jnp.asarray(packed.batch(0, options.batch)),
    shape,
    FLAGS.time_steps,
  )
  rows = [
    ("one step", f"{found.seconds * 1e3:.0f} ms"),
    ("tokens", f"{found.tokens_per_second:,.0f} a second"),
    ("arithmetic", f"{found.flops / 1e9:.1f} GFLOP/s"),
    ("a float32 product", f"{found.gemm_flops / 1e9:.1f} GFLOP/s"),
    ("share of it", f"{found.flops / found.gemm_flops:.0%}"),
    ("load", " ".join(f"{load:.2f}" for load in os.getloadavg())),
  ]
  terminal.report(terminal.table(rows))


def run() -> None:
  """Checks everything, then trains."""
  config, shape, options = read_config()
  _mesh.join()
  if not (FLAGS.folder or FLAGS.time_steps):
    raise ValueError("give --folder, where the run is to live")
  if FLAGS.time_steps and FLAGS.mesh:
    raise ValueError("--time_steps times one device; leave --mesh out")
  if not FLAGS.time_steps:
    _main.take_folder("--folder", FLAGS.folder)
  tokenizer = checkpoints.load_tokenizer(fetch(config["tokenizer"]))
  _training.check_rows(tokenizer, shape)
  packed, held_out = _training.load_data(config, options, tokenizer)
  place, target_place = find_places(config, shape, options)
  target = load_target(config, shape, tokenizer, target_place)
  model = transformer.model(shape, place)
  params = first_weights(config, shape, options.seed, place)
  aim, frozen, decode = objective.language_model(model), None, None
  if target is not None:
    target_model = transformer.model(target.config, target_place)
    aim = objective.distillation(model, target_model, config["loss"])
    frozen = target.params
    draft = drafters.model(model, config["decoding"]["k"])
    judge = _training.judge(config["decoding"], held_out, target_model, draft)

    def decode(weights):
      return judge(Params(target.params, weights))

  if FLAGS.time_steps:
    return time_steps(params, frozen, aim, packed, shape, options)

  folder = Path(FLAGS.folder)
  settings = config | dict(
    model=dataclasses.asdict(shape),
    options=dataclasses.asdict(options),
    checksums=dict(
      data=saving.checksum(packed.rows),
      held_out=saving.checksum(held_out.rows),
      target=saving.checksum(frozen),
      first_weights=saving.checksum(params),
    ),
  )
  files.claim(folder, settings, FREE)
  if target is not None and (config.get("samples") or {}).get("count"):
    packed = _training.sample(
      config["samples"], packed, target_model, frozen, options, folder
    )
  size = f"{shape.num_parameters / 1e6:.2f} M parameters"
  _training.say_size("train", size, options, packed)
  train(
    params,
    frozen,
    aim,
    packed,
    held_out,
    options,
    folder,
    export=lambda weights, name: _training.export(
      folder, name, weights, shape, tokenizer
    ),
    decode=decode,
    where=place and model_params.shardings(shape, place),
  )


main = _main.main_of(
  "train",
  run,
  also=(TypeError,),  # an entry of Options that is none
  interrupted="stopped; the same command goes on from the last checkpoint",
)

if __name__ == "__main__":
  _main.start(main)
