"""Trains a target from scratch, with or without an auxiliary loss.

Invariant: all kinds of auxiliary loss see the same texts in the same order, and
the target's initial weights depend on the seed alone.
"""

from pathlib import Path

import jax

from specdec import checkpoints, drafters, multihost
from specdec.checkpoints import learned as saved
from specdec.drafters.heads import draft_head, vocabulary
from specdec.models import params as model_params
from specdec.models import transformer
from specdec.training import data, evaluate, joint, placing, run, saving
from specdec.training.setup import JointSetup
from specdec.types import Params

DRAFTER = f"drafter{saved.SUFFIX}"  # its file, in the target's folder


def train(
  setup: JointSetup,
  folder: Path,
  mesh: str | None = None,
  draft_ways: int | None = None,
) -> None:
  """Trains, resuming the run if `folder` has a part of it, on whatever mesh.

  Args:
    mesh, draft_ways: as of train_drafter.train.

  Raises:
    ValueError: the config and the texts do not go together, or the folder holds
      another run.
    FileNotFoundError: a text or the tokenizer is not there.
    MemoryError: it would not fit.
  """
  config, options, decoding = setup.model, setup.options, setup.decoding
  head_config = setup.head_config
  where = placing.places(mesh, config, head_config, options, draft_ways)
  plan = placing.plan(head_config, config, where, True)
  placing.check_memory(plan, where.target)
  model = transformer.model(config, where.target)
  trained = transformer.model(options.in_dtype(config), where.target)
  tokenizer = data.load_tokenizer(setup.tokenizer, config.vocab_size)
  packed, held_out = texts = data.load(
    setup.data, setup.held_out, options, tokenizer
  )
  target = checkpoints.random_checkpoint(
    config, options.seed, place=where.target
  ).params
  params, lie = {"target": target}, {}
  if where.target:
    lie["target"] = model_params.shardings(config, where.target)
  size = f"{setup.kind}, {config.num_parameters / 1e6:.2f} M parameters"
  decode, ids = None, None
  if head_config:
    ids = vocabulary.most_frequent(
      packed.rows, head_config.vocabulary, config.vocab_size
    )
    serving, unrolled = placing.heads(head_config, config, ids, where.draft)
    objective, evaluated = (
      joint.with_drafter(trained, unrolled, setup.loss, measured)
      for measured in (False, True)
    )
    measure = evaluate.head_by_decoding(
      model, serving, held_out, decoding, where.target
    )

    def decode(weights):
      net = placing.gathered(weights["drafter"], where.draft)
      return measure(weights["target"], net)

    net = serving.init(jax.random.key(options.seed))
    params["drafter"] = net = placing.put(unrolled, net, where.draft)
    if where.draft:
      lie["drafter"] = draft_head.shardings(unrolled, net, where.draft)
    net_size = sum(x.size for x in jax.tree.leaves(net))
    size += f" and {net_size / 1e6:.2f} M of the drafter"
  elif setup.layer_skip:
    objective = joint.layer_skip(
      trained, setup.layer_skip, options.steps, options.seed
    )
    evaluated = joint.exit_losses(trained)
    drafter = drafters.early_exit(model, decoding.exit_layer, decoding.k)
    measure = evaluate.acceptance_by_decoding(
      model, drafter, held_out, decoding
    )

    def decode(weights):
      return measure(Params(weights["target"]))

    packed = data.Numbered(packed)
  else:
    objective = evaluated = joint.target_only(trained)
  settings = run.settings(setup, texts, first_weights=target)
  run.claim(folder, settings | {"kind": setup.kind})

  def export(weights, name):
    # Of every process, before the first one writes.
    net = jax.tree.map(multihost.whole, weights.get("drafter"))

    def write_drafter(scratch):  # which is for these weights and no others
      fingerprint = saved.fingerprint(checkpoints.load(scratch))
      saved.save(
        scratch / DRAFTER,
        head_config,
        ids,
        net,
        fingerprint,
        "float32",
      )

    extra = write_drafter if head_config else None
    path = folder / name
    saving.export_model(path, weights["target"], config, tokenizer, extra)

  run.announce(size, options, packed)
  run.train(
    params,
    None,
    objective,
    packed,
    held_out,
    options,
    folder,
    export=export,
    decode=decode,
    where=lie if mesh else None,
    evaluated=joint.with_target_loss(evaluated),
  )
