"""Trains a target from scratch with a second loss beside its own, or without.

  python scripts/train_joint.py --config=configs/train/joint.py:prophet \\
    --folder=runs/joint/prophet-0
  python scripts/train_joint.py --config=configs/train/joint.py:none \\
    --config.options.seed=1 --folder=runs/joint/none-1   # any entry, by name
  python scripts/compare_joint.py 'runs/joint/*'

The second loss is a drafter's (`head config` and `loss` in the config: prophet,
MTP, Medusa and every other that train_drafter.py knows), or LayerSkip's
(`layer_skip`: layers left out at random, losses at early exits), or there is
none. Its gradient reaches the target. Held-out losses are the target's own,
nothing left out; tokens per pass are those of the drafter that came of it.

The same command again goes on where the run was stopped or killed, to the same
weights bit for bit. The folder gets best/ and last/ (checkpoints that every
script here and transformers load, the drafter in them as drafter.safetensors),
metrics.jsonl, TensorBoard's files under tensorboard/ and the resumable state
under checkpoints/.
"""

import dataclasses
from pathlib import Path

import _config
import _main
import _training
import jax
from absl import flags

from specdec import checkpoints, draft_shape, drafters
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.drafters.heads import draft_head as draft_heads
from specdec.drafters.heads import serve, vocabulary
from specdec.drafters.heads.head_config import HeadConfig
from specdec.drafters.heads.unroll import growing
from specdec.models import transformer
from specdec.training import data, drafting, joint, saving
from specdec.training.options import FREE, Options
from specdec.training.run import train
from specdec.types import Params
from specdec.utils import files

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
  "tokenizer": (),
  "data": (),
  "held_out": (),
  "model": (),
  "options": (),
}
OPTIONAL = {
  "head_config": ("kind",),
  "loss": (),
  "layer_skip": (),
  "decoding": _training.DECODING,
}
DRAFTER = f"drafter{saved.SUFFIX}"  # its file, in the target's folder


def read_config():
  """The config, its parts as what they describe; None where there is none."""
  config = FLAGS.config.to_dict()
  required, optional = dict(REQUIRED), dict(OPTIONAL)
  if config.get("head_config"):
    required |= {name: OPTIONAL[name] for name in ("loss", "decoding")}
  elif config.get("layer_skip"):
    required["decoding"] = (*_training.DECODING, "exit_layer")
    optional.pop("decoding")
  _training.check_entries(config, required, optional)
  if config.get("head_config") and config.get("layer_skip"):
    raise ValueError(
      "--config sets head config and layer_skip; take one of them"
    )
  if config.get("loss") and not config.get("head_config"):
    raise ValueError(
      "--config sets loss, and no head config that it could be of"
    )
  shape, options = _training.shape_of(config), Options(**config["options"])
  head_config = loss = skip = None
  if config.get("head_config"):
    features = tuple(config["head_config"].get("features", ()))
    head_config = HeadConfig(**config["head_config"] | {"features": features})
    head_config.check(shape)
    loss = drafting.Loss(**config["loss"])
  if config.get("layer_skip"):
    skip = joint.LayerSkip(**config["layer_skip"])
  return config, shape, options, head_config, loss, skip


def with_drafter(config, shape, options, head_config, loss, packed, held_out):
  """(the net's first weights, objective, evaluated, decode, ids) of a head
  config.
  """
  model = transformer.model(shape)
  ids, _ = vocabulary.most_frequent(
    packed.rows, head_config.vocabulary, shape.vocab_size
  )
  make = drafters.LEARNED[head_config.kind]
  serving, draft_head = (
    make(head_config, shape, ids, p) for p in (None, growing)
  )
  decoding = config["decoding"]
  drafter = serve.drafter(serving, model, draft_shape.chain(decoding["k"]))
  judge = _training.judge(decoding, held_out, model, drafter)

  def decode(weights):
    target, net = weights["target"], weights["drafter"]
    return judge(Params(target, draft_heads.weights_of(serving, net, target)))

  aim, evaluated = (
    joint.with_drafter(model, draft_head, loss, measure)
    for measure in (False, True)
  )
  net = serving.init(jax.random.key(options.seed))
  return net, aim, evaluated, decode, ids


def with_exits(config, shape, options, skip, held_out):
  """(objective, evaluated, decode) of LayerSkip."""
  model, decoding = transformer.model(shape), config["decoding"]
  count = shape.num_layers
  aim = joint.layer_skip(model, count, skip, options.steps, options.seed)
  drafter = drafters.early_exit(model, decoding["exit_layer"], decoding["k"])
  judge = _training.judge(decoding, held_out, model, drafter)

  def decode(weights):
    return judge(Params(weights["target"]))

  return aim, joint.exit_losses(model, count), decode


def run() -> None:
  """Checks everything, then trains."""
  config, shape, options, head_config, loss, skip = read_config()
  _main.take_folder("--folder", FLAGS.folder)
  tokenizer = checkpoints.load_tokenizer(fetch(config["tokenizer"]))
  _training.check_rows(tokenizer, shape)
  packed, held_out = _training.load_data(config, options, tokenizer)
  checksums = dict(
    data=saving.checksum(packed.rows), held_out=saving.checksum(held_out.rows)
  )
  # Of every kind the same, so that they differ by the second loss alone.
  target = checkpoints.random_checkpoint(shape, options.seed).params
  params, ids, decode = {"target": target}, None, None
  if head_config:
    params["drafter"], aim, evaluated, decode, ids = with_drafter(
      config, shape, options, head_config, loss, packed, held_out
    )
  elif skip:
    aim, evaluated, decode = with_exits(config, shape, options, skip, held_out)
    packed = data.Numbered(packed)
  else:
    aim = evaluated = joint.target_only(transformer.model(shape))
  kind = head_config.kind if head_config else "layerskip" if skip else "none"

  folder = Path(FLAGS.folder)
  settings = config | dict(
    kind=kind,
    model=dataclasses.asdict(shape),
    options=dataclasses.asdict(options),
    head_config=head_config and dataclasses.asdict(head_config),
    loss=loss and dataclasses.asdict(loss),
    layer_skip=skip and dataclasses.asdict(skip),
    checksums=checksums | {"first_weights": saving.checksum(target)},
  )
  files.claim(folder, settings, FREE)

  def export(weights, name):
    def overhead(scratch):  # made for these very weights, and no others
      fingerprint = saved.fingerprint(checkpoints.load(scratch))
      net = weights["drafter"]
      saved.save(
        scratch / DRAFTER, head_config, ids, net, fingerprint, "float32"
      )

    also = overhead if head_config else None
    _training.export(folder, name, weights["target"], shape, tokenizer, also)

  size = f"{kind}, {shape.num_parameters / 1e6:.2f} M parameters"
  if head_config:
    own = sum(x.size for x in jax.tree.leaves(params["drafter"]))
    size += f" and {own / 1e6:.2f} M of the drafter"
  _training.say_size("train_joint", size, options, packed)
  train(
    params,
    None,
    aim,
    packed,
    held_out,
    options,
    folder,
    export=export,
    decode=decode,
    evaluated=joint.with_target_loss(evaluated),
  )


main = _main.main_of(
  "train_joint",
  run,
  also=(
    TypeError,
  ),  # an entry of HeadConfig, Loss, LayerSkip, Options: there none
  interrupted="stopped; the same command goes on from the last checkpoint",
)

if __name__ == "__main__":
  _main.start(main)
