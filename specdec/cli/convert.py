"""Rewrites a checkpoint: Hugging Face, GGUF or Orbax in; two layouts out.

  python scripts/convert.py --source=model.gguf --output=DIR
  python scripts/convert.py --source=DIR --output=DIR2 --layout=orbax
  python scripts/convert.py --source=DIR --output=DIR2 --dtype=float16

safetensors: what transformers and this repository read. orbax: the same with
the weights as one Orbax checkpoint, which is read and written shard by shard.
Both carry config.json and the tokenizer; a quantised GGUF is dequantised.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from specdec import checkpoints
from specdec.checkpoints.fetch import fetch
from specdec.cli import app
from specdec.utils import files, terminal

LAYOUTS = {
  "safetensors": checkpoints.save_safetensors,
  "orbax": checkpoints.save_orbax,
}


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string("source", None, "What to read, named like --target.")
  flags.string("output", None, "Folder to write; must be new or empty.")
  flags.enum("layout", "safetensors", list(LAYOUTS), "See above.")
  flags.enum(
    "dtype",
    "float32",
    ("float32", "bfloat16", "float16"),
    "Of the weights. Of the two of 16 bits float16 keeps three bits more and "
    "overflows at 65504, which is refused.",
  )


def convert(options: app.Options) -> None:
  """Reads, casts, writes; reads the result once more."""
  if not (options.source and options.output):
    raise ValueError("give --source and --output")
  output = Path(options.output).expanduser()
  app.check_folder("--output", str(output))
  if output.exists() and any(output.iterdir()):
    raise ValueError(f"{output} is not empty; name another folder")
  model = checkpoints.load(fetch(options.source))
  dtype = jnp.dtype(options.dtype)
  params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
  if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(params)):
    raise ValueError(f"some weights do not fit into {options.dtype}")

  def write(folder):
    LAYOUTS[options.layout](folder, params, model.config)
    if model.tokenizer is not None:
      model.tokenizer.save(folder)
    elif model.eos_ids:
      text = json.dumps({"eos_token_id": list(model.eos_ids)}) + "\n"
      files.replace_file(folder / "generation_config.json", text)
    checkpoints.load(folder)

  files.replace_folder(output, write)
  sizes = [x.stat().st_size for x in output.rglob("*") if x.is_file()]
  terminal.report(
    f"{output}: {model.config.num_parameters / 1e6:.2f} M parameters, "
    f"{sum(sizes) / 1e6:.1f} MB in {len(sizes)} files"
  )


main = app.Program(__doc__, define, convert)
