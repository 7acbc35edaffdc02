"""A directory whose weights are one Orbax checkpoint, under our own names.

config.json and the tokenizer stand beside it as in a Hugging Face directory.
Orbax reads and writes arrays shard by shard, so this is the form for meshes.
Invariant: orbax/ appears complete, by Orbax's one rename.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import traverse_util

from specdec.checkpoints import huggingface, names
from specdec.models import params as model_params
from specdec.models.config import TransformerConfig

FOLDER = "orbax"


def has_weights(directory: Path) -> bool:
  """Whether there are Orbax weights to load."""
  return (directory / FOLDER).is_dir()


def save(
  directory: str | Path, params: dict, config: TransformerConfig
) -> None:
  """Writes config.json and orbax/, readable by `load`; replaces both.

  Raises:
    ValueError: params do not fit config, or the config has no such form.
  """
  directory = Path(directory).absolute()
  huggingface.write_config(directory, params, config)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(directory / FOLDER, params, force=True)


def read(
  directory: Path,
  config: TransformerConfig,
  dtype: str,
  shardings: dict | None = None,
) -> dict:
  """The parameters, of `dtype`, and where `shardings`, a tree like them, say.

  Raises:
    ValueError: a tensor is missing, unknown or misshapen, or a file damaged.
  """
  path = directory.absolute() / FOLDER
  wanted = {
    path: spec.shape for path, spec in model_params.specs(config).items()
  }
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      found = traverse_util.flatten_dict(
        checkpointer.metadata(path).item_metadata.tree, sep="/"
      )
    except Exception as error:  # Orbax raises what its readers raise
      raise ValueError(f"{path} is no complete checkpoint: {error}") from error
    names.check(
      wanted, {name: leaf.shape for name, leaf in found.items()}, str(path)
    )
    where = traverse_util.flatten_dict(shardings or {}, sep="/")
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = {
      name: jax.ShapeDtypeStruct(
        shape,
        jnp.dtype(dtype),
        sharding=where.get(name, device),
      )
      for name, shape in wanted.items()
    }
    try:
      return checkpointer.restore(
        path, traverse_util.unflatten_dict(shapes, sep="/")
      )
    except Exception as error:
      raise ValueError(f"{path} cannot be read: {error}") from error
