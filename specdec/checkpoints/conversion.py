"""Rewrites models and drafters in another layout."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from specdec import checkpoints
from specdec.checkpoints import formats, hf_config, huggingface
from specdec.checkpoints import learned as saved
from specdec.checkpoints.fetch import fetch
from specdec.checkpoints.loading import Checkpoint, check_finite
from specdec.models.config import DTYPES, TransformerConfig
from specdec.models.params import cast
from specdec.models.weight_formats import STORED, WeightFormat
from specdec.utils import files

MODELS = {
  "safetensors": checkpoints.save_safetensors,
  "orbax": checkpoints.save_orbax,
}
OURS = "specdec"
DRAFTERS = (OURS, *formats.WRITTEN)
FILE = f"drafter{saved.SUFFIX}"  # of ours in a folder that is written


def convert_model(
  source: Path,
  layout: str,
  output: Path,
  dtype: str,
  weights: WeightFormat | None = None,
) -> Checkpoint:
  """Reads a model, casts it and writes it into a folder with its tokenizer.

  Args:
    layout: one of MODELS.
    output: folder, which is made.
    dtype: of the written weights.
    weights: integers for matrices; None: dtype.

  Returns:
    The model as it was read.

  Raises:
    ValueError: layout and weights do not go together, or weights do not fit
      into dtype.
  """
  if weights and layout == "orbax":
    raise ValueError(
      f"weights = {weights} go into layout = 'safetensors', not {layout!r}"
    )
  if weights and weights.kind in (*DTYPES, "float16"):
    raise ValueError(
      f"weights = {weights} are no integers; give dtype = {weights}"
    )
  model = checkpoints.load(source, weights=weights)
  params = cast(model.params, dtype)
  try:
    check_finite(params, dtype)
  except ValueError:
    raise ValueError(f"some weights do not fit into {dtype}") from None
  MODELS[layout](output, params, model.config, model.trained_length)
  if model.tokenizer is not None:
    model.tokenizer.save(output, model.config.first_token)
  elif model.eos_ids:
    text = json.dumps({"eos_token_id": list(model.eos_ids)}) + "\n"
    files.replace_file(output / "generation_config.json", text)
  checkpoints.load(output, weights=weights and WeightFormat(STORED))
  return model


def describe_target(name: str, config: TransformerConfig) -> formats.Target:
  """Returns what formats say of a target.

  Args:
    name: by which an engine finds it; a folder's config.json is read.
  """
  path = Path(fetch(name))
  content = {}
  if path.is_dir():
    content = huggingface.read_json(path / "config.json")
  if "architectures" not in content:  # GGUF
    content |= {"architectures": hf_config.render(config)["architectures"]}
  return formats.target_of(config)._replace(
    name=name,
    architectures=tuple(hf_config.architectures(content)),
    max_length=content.get("max_position_embeddings"),
  )


def convert_drafter(
  source: str, target: str, layout: str, output: Path, dtype: str
) -> saved.Learned:
  """Reads a drafter in any format, writes it into a folder in one of DRAFTERS.

  Args:
    source: its file or folder, a name of ours or one on the hub.
    target: name of the model that it drafts for.
    output: folder, which is made.
    dtype: of the written weights.

  Returns:
    The drafter as it is read back.

  Raises:
    ValueError: target or layout does not fit, or something is damaged.
    FileNotFoundError: a file is not there.
  """
  path = saved.resolve(source)
  model = checkpoints.load(fetch(target))
  learned = saved.load(path, model)
  head_config, ids, net = learned.head_config, learned.ids, learned.net
  if layout == OURS:
    path = output / FILE
    saved.save(path, head_config, ids, net, saved.fingerprint(model), dtype)
  else:
    path = output
    described = describe_target(target, model.config)
    if formats.holds_copies(layout):
      head_config, net = saved.with_copies(head_config, net, model.params)
    formats.save(output, layout, head_config, ids, net, described, dtype)
  result = saved.load(path, model)
  read_config, read = result.head_config, result.net
  if formats.holds_copies(layout):  # in dtype they may still be the target's
    read_config, read = saved.with_copies(read_config, read, model.params)
  # What a format cannot say: how many levels a head was trained for.
  wrote = dataclasses.replace(head_config, levels=read_config.levels)
  same = jax.tree.map(
    lambda a, b: bool(jnp.array_equal(a.astype(dtype), b.astype(dtype))),
    net,
    read,
  )
  if wrote != read_config or not all(jax.tree.leaves(same)):
    raise ValueError(f"{layout} does not hold this {head_config.kind} exactly")
  return result
