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

import _main
import jax
import jax.numpy as jnp
from absl import flags

from specdec import checkpoints
from specdec.checkpoints.fetch import fetch
from specdec.utils import files, terminal

LAYOUTS = {
  "safetensors": checkpoints.save_safetensors,
  "orbax": checkpoints.save_orbax,
}

_SOURCE = flags.DEFINE_string(
  "source", None, "What to read, named like --target.", required=True
)
_OUTPUT = flags.DEFINE_string(
  "output", None, "Folder to write; must be new or empty.", required=True
)
_LAYOUT = flags.DEFINE_enum(
  "layout", "safetensors", list(LAYOUTS), "See above."
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "float32",
  ("float32", "bfloat16", "float16"),
  "Of the weights. Of the two of 16 bits float16 keeps three bits more and "
  "overflows at 65504, which is refused.",
)


def convert() -> None:
  """Reads, casts, writes; reads the result once more."""
  output = Path(_OUTPUT.value).expanduser()
  _main.check_folder("--output", str(output))
  if output.exists() and any(output.iterdir()):
    raise ValueError(f"{output} is not empty; name another folder")
  model = checkpoints.load(fetch(_SOURCE.value))
  dtype = jnp.dtype(_DTYPE.value)
  params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
  if not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(params)):
    raise ValueError(f"some weights do not fit into {_DTYPE.value}")

  def write(folder):
    LAYOUTS[_LAYOUT.value](folder, params, model.config)
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


main = _main.main_of("convert", convert)

if __name__ == "__main__":
  _main.start(main)
