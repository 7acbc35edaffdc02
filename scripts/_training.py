"""Configs, texts, evaluation and checkpoints of the programs that train."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from specdec import acceptance, checkpoints, multihost
from specdec.models.config import RopeScaling, TransformerConfig, check_limits
from specdec.training import data, evaluate, samples
from specdec.training.options import Options
from specdec.types import Drafter, Model, Params
from specdec.utils import files, terminal

# What a config says of how drafts are evaluated, and of texts to be sampled.
DECODING = ("k", "prompts", "length", "new_tokens", "temperature")
SAMPLES = ("count", "prompt", "temperature")


def check_entries(
  config: dict,
  required: Mapping[str, Sequence[str]],
  optional: Mapping[str, Sequence[str]],
) -> None:
  """Refuses a config with entries unknown or missing.

  Args:
    required, optional: names of entries, and what each of them must hold.
  """
  known = {**required, **optional}
  unknown = sorted(set(config) - set(known))
  if unknown:
    raise ValueError(
      f"--config sets {', '.join(unknown)}; accepted: {', '.join(known)}"
    )
  missing = sorted(name for name in required if config.get(name) is None)
  missing += [
    f"{name}.{entry}"
    for name, entries in known.items()
    if config.get(name)
    for entry in sorted(entries)
    if entry not in config[name]
  ]
  if missing:
    raise ValueError(f"--config lacks {', '.join(missing)}")


def shape_of(config: dict) -> TransformerConfig:
  """The model that config['model'] describes."""
  model = dict(config["model"])
  if model.get("rope_scaling"):
    model["rope_scaling"] = RopeScaling(**model["rope_scaling"])
  model["windows"] = tuple(model.get("windows", ()))
  shape = TransformerConfig(**model)
  check_limits(shape.num_layers, shape.num_experts)
  if shape.dtype != "float32":
    raise ValueError(
      f"model.dtype = {shape.dtype!r}; weights are trained in float32, and "
      "options.dtype is that of the products"
    )
  return shape


def check_rows(tokenizer, shape: TransformerConfig) -> None:
  """Refuses a tokenizer with more tokens than the model has rows."""
  if tokenizer.vocab_size > shape.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} tokens and the model "
      f"{shape.vocab_size}; the model needs a row for each"
    )


def load_data(config, options: Options, tokenizer):
  """Training and held-out sequences."""
  packed = []
  for name, seed in (("data", options.seed), ("held_out", 0)):
    stream = data.tokenize(data.read(config[name]), tokenizer)
    try:
      packed.append(data.Packed(stream, options.sequence, seed))
    except ValueError as error:
      raise ValueError(f"{config[name]}: {error}") from None
    terminal.report(
      f"{name}: {len(stream):,} tokens of {config[name]}",
      file=sys.stderr,
    )
  return packed


def sample(wanted, packed, target_model, frozen, options: Options, folder):
  """The data with every text's end written by the target instead."""
  rows = packed.evenly_spaced(wanted["count"])[:, : wanted["prompt"]]
  texts = samples.sample(
    target_model,
    frozen,
    rows,
    options.sequence + 1,
    Path(folder) / "samples",
    temperature=wanted["temperature"],
    seed=options.seed,
  )
  return data.Sequences(texts, options.seed)


def judge(
  decoding: dict, held_out, target: Model, drafter: Drafter
) -> Callable[[Params], dict]:
  """Weights of both to their acceptance, by decoding held-out prompts.

  Raises:
    ValueError: a number of `decoding` is out of range.
  """
  for name in ("prompts", "length", "new_tokens"):
    if decoding[name] < 1:
      raise ValueError(f"decoding.{name} = {decoding[name]}; it must be >= 1")
  if decoding["temperature"] < 0:
    raise ValueError(
      f"decoding.temperature = {decoding['temperature']}; it must be >= 0"
    )
  rows = held_out.evenly_spaced(decoding["prompts"])
  if decoding["length"] > rows.shape[1]:
    raise ValueError(
      f"decoding.length = {decoding['length']}; a sequence has {rows.shape[1]} "
      "tokens"
    )
  prompts = rows[:, : decoding["length"]]

  def measure(params: Params) -> dict:
    return evaluate.by_decoding(
      target,
      drafter,
      acceptance.rejection(),
      params.target,
      prompts,
      new_tokens=decoding["new_tokens"],
      temperature=decoding["temperature"],
    )(params.draft)

  return measure


def say_size(name: str, size: str, options: Options, packed) -> None:
  """One line: what is trained, and on how much."""
  tokens = options.steps * options.batch * options.sequence
  terminal.report(
    f"{name}: {size}, {options.steps:,} steps of {options.batch} x "
    f"{options.sequence} tokens, {tokens / 1e6:.2f} M in all, "
    f"{tokens / packed.tokens:.2f} times over the data",
    file=sys.stderr,
  )


def export(
  folder: Path,
  name: str,
  weights,
  shape: TransformerConfig,
  tokenizer,
  also: Callable[[Path], None] | None = None,
) -> None:
  """Writes a checkpoint, whole or not at all.

  Args:
    also: writes what belongs to it into the folder that it is given, where the
      checkpoint lies already.
  """
  weights = jax.tree.map(multihost.whole, weights)
  if not multihost.is_first():
    return

  def write(scratch):
    checkpoints.save_safetensors(scratch, weights, shape)
    tokenizer.save(scratch)
    if also is not None:
      also(scratch)

  files.replace_folder(folder / name, write)
