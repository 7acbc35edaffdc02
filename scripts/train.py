"""Trains a language model, or distils a draft from its target.

  python scripts/train.py --config=configs/train/target.py --folder=runs/target
  python scripts/train.py --config=configs/train/draft.py --folder=runs/draft
  python scripts/train.py ... --config.options.steps=50   # any entry, by name

The same command again goes on where the run was stopped or killed, to the same
weights bit for bit. The folder gets best/ and last/ (checkpoints that every
script here and transformers load), metrics.jsonl, TensorBoard's files under
tensorboard/ and the resumable state under checkpoints/. A draft is judged, at
every evaluation, by decoding with its target.
"""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import _main
import _mesh
import jax
import jax.numpy as jnp
from absl import flags
from ml_collections import config_flags

from specdec import (
  acceptance,
  checkpoints,
  display,
  drafters,
  hosts,
  memory,
  run_folder,
)
from specdec.checkpoints.fetch import fetch
from specdec.models import transformer
from specdec.models.config import RopeScaling, TransformerConfig
from specdec.training import (
  data,
  evaluate,
  loop,
  objective,
  samples,
  saving,
  speed,
)
from specdec.training.options import FREE, Options
from specdec.training.run import train

config_flags.DEFINE_config_file(
  "config", None, "File whose get_config() says what to train, on what, how."
)
flags.DEFINE_string("folder", None, "Folder of the run.")
flags.DEFINE_integer(
  "time_steps", 0, "Time so many steps beside a matrix product, and stop there."
)
flags.mark_flag_as_required("config")
flags.adopt_module_key_flags(_mesh)
FLAGS = flags.FLAGS
# Entries of a config, and whether it must have them.
KNOWN = {
  "tokenizer": True,
  "data": True,
  "held_out": True,
  "model": True,
  "options": True,
  "start": False,
  "target": False,
  "loss": False,
  "samples": False,
  "decoding": False,
}
# Those of a draft, with the entries they must have.
DISTILLATION = {
  "decoding": {"k", "prompts", "length", "new_tokens", "temperature"},
  "samples": {"count", "prompt", "temperature"},
}


def read_config():
  """The config as plain dictionaries, its entries checked."""
  config = FLAGS.config.to_dict()
  unknown = sorted(set(config) - set(KNOWN))
  if unknown:
    raise ValueError(
      f"--config sets {', '.join(unknown)}; accepted: {', '.join(KNOWN)}"
    )
  wanted = {name for name, required in KNOWN.items() if required}
  if config.get("target"):
    wanted |= {"loss", "decoding"}
  missing = sorted(name for name in wanted if config.get(name) is None)
  for name, entries in DISTILLATION.items():
    if config.get(name):
      found = set(config[name])
      missing += [f"{name}.{entry}" for entry in sorted(entries - found)]
  if missing:
    raise ValueError(f"--config lacks {', '.join(missing)}")
  model = dict(config["model"])
  if model.get("rope_scaling"):
    model["rope_scaling"] = RopeScaling(**model["rope_scaling"])
  model["windows"] = tuple(model.get("windows", ()))
  shape = TransformerConfig(**model)
  if shape.dtype != "float32":
    raise ValueError(
      f"model.dtype = {shape.dtype!r}; weights are trained in float32, and "
      "options.dtype is that of the products"
    )
  return config, shape, Options(**config["options"])


def load_data(config, options: Options, tokenizer):
  """Training and held-out sequences."""
  packed = []
  for name, seed in (("data", options.seed), ("held_out", 0)):
    stream = data.tokenize(data.read(config[name]), tokenizer)
    try:
      packed.append(data.Packed(stream, options.sequence, seed))
    except ValueError as error:
      raise ValueError(f"{config[name]}: {error}") from None
    print(
      f"train: {name}: {len(stream):,} tokens of {config[name]}",
      file=sys.stderr,
    )
  return packed


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
  plan = memory.training(
    model, target if config.get("target") else None, *found
  )
  print(
    f"train: memory on each device: {plan} and activations", file=sys.stderr
  )
  memory.check(plan, found[0])
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
    found = run_folder.differences(
      dataclasses.asdict(start.config), dataclasses.asdict(shape)
    )
    raise ValueError(f"start is of another shape: {'; '.join(found)}")
  return start.params


def sample(wanted, packed, target_model, frozen, options: Options):
  """The data with every text's end written by the target instead."""
  rows = packed.spread(wanted["count"])[:, : wanted["prompt"]]
  texts = samples.sample(
    target_model,
    frozen,
    rows,
    options.sequence + 1,
    Path(FLAGS.folder) / "samples",
    temperature=wanted["temperature"],
    seed=options.seed,
  )
  return data.Sequences(texts, options.seed)


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
  print(display.table(rows))


def judge(config, model, target_model, target, held_out):
  """The draft's weights to its acceptance, by decoding held-out prompts."""
  decoding = config["decoding"]
  prompts = held_out.spread(decoding["prompts"])[:, : decoding["length"]]
  return evaluate.by_decoding(
    target_model,
    drafters.model(model, decoding["k"]),
    acceptance.rejection(),
    target.params,
    prompts,
    new_tokens=decoding["new_tokens"],
    temperature=decoding["temperature"],
  )


def export(folder: Path, name: str, weights, shape, tokenizer) -> None:
  """Writes a checkpoint beside and renames it into its place."""
  weights = jax.tree.map(hosts.whole, weights)
  if not hosts.is_first():
    return
  scratch, old = folder / f".{name}", folder / f".{name}.old"
  for path in (scratch, old):
    shutil.rmtree(path, ignore_errors=True)
  checkpoints.save_safetensors(scratch, weights, shape)
  tokenizer.save(scratch)
  if (folder / name).exists():
    (folder / name).rename(old)
  scratch.rename(folder / name)
  shutil.rmtree(old, ignore_errors=True)


def run() -> None:
  """Checks everything, then trains."""
  config, shape, options = read_config()
  _mesh.join()
  if not (FLAGS.folder or FLAGS.time_steps):
    raise ValueError("give --folder, where the run is to live")
  if FLAGS.time_steps and FLAGS.mesh:
    raise ValueError("--time_steps times one device; leave --mesh out")
  tokenizer = checkpoints.load_tokenizer(fetch(config["tokenizer"]))
  if tokenizer.vocab_size > shape.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} tokens and the model "
      f"{shape.vocab_size}; the model needs a row for each"
    )
  packed, held_out = load_data(config, options, tokenizer)
  place, target_place = find_places(config, shape, options)
  target = load_target(config, shape, tokenizer, target_place)
  model = transformer.model(shape, place)
  params = first_weights(config, shape, options.seed, place)
  aim, frozen, decode = objective.language_model(model), None, None
  if target is not None:
    target_model = transformer.model(target.config, target_place)
    aim = objective.distillation(model, target_model, config["loss"])
    frozen = target.params
    decode = judge(config, model, target_model, target, held_out)
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
  run_folder.claim(folder, settings, FREE)
  if target is not None and (config.get("samples") or {}).get("count"):
    packed = sample(config["samples"], packed, target_model, frozen, options)
  size = f"{shape.num_parameters / 1e6:.2f} M parameters"
  tokens = options.steps * options.batch * options.sequence
  print(
    f"train: {size}, {options.steps:,} steps of {options.batch} x "
    f"{options.sequence} tokens, {tokens / 1e6:.2f} M in all, "
    f"{tokens / packed.tokens:.2f} times over the data",
    file=sys.stderr,
  )
  train(
    params,
    frozen,
    aim,
    packed,
    held_out,
    options,
    folder,
    export=lambda weights, name: export(
      folder, name, weights, shape, tokenizer
    ),
    decode=decode,
    where=place and checkpoints.shardings(shape, place),
  )


main = _main.main_of(
  "train",
  run,
  also=(TypeError,),  # an entry of Options that is none
  interrupted="stopped; the same command goes on from the last checkpoint",
)

if __name__ == "__main__":
  _main.start(main)
