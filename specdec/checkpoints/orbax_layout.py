"""Model directories with weights in an Orbax checkpoint.

The checkpoint is in orbax/, next to the config.json and tokenizer of a Hugging
Face directory, and uses the paths of the Flax parameter tree. Invariant: orbax/
is renamed into place once it is complete.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import traverse_util

from specdec.checkpoints import huggingface, names
from specdec.models import params as model_params
from specdec.models.config import TransformerConfig
from specdec.utils import orbax_errors, remote

FOLDER = huggingface.ORBAX


def has_weights(directory: Path) -> bool:
  """Whether a directory holds Orbax weights."""
  return (directory / FOLDER).is_dir()


def save(
  directory: str | Path,
  params: dict,
  config: TransformerConfig,
  trained_length: int | None = None,
) -> None:
  """Writes config.json and orbax/, replacing them; see `save_safetensors`.

  Raises `write_config`'s, and NotWritten where the disk is full.
  """
  directory = remote.as_path(directory)
  if not remote.is_remote(directory):
    directory = directory.absolute()
  huggingface.write_config(directory, params, config, trained_length)
  with (
    orbax_errors.named(directory / FOLDER),
    ocp.StandardCheckpointer() as checkpointer,
  ):
    checkpointer.save(directory / FOLDER, params, force=True)


def read(
  directory: Path, config: TransformerConfig, shardings: dict | None = None
) -> dict:
  """Reads the parameters in the config's types, by default onto the first local
  device.

  Raises ValueError for a missing, unexpected or misshapen tensor, and for
  damaged files.
  """
  path = directory.absolute() / FOLDER
  expected = {
    name: spec.shape for name, spec in model_params.specs(config).items()
  }
  with ocp.StandardCheckpointer() as checkpointer:
    try:
      metadata = traverse_util.flatten_dict(
        checkpointer.metadata(path).item_metadata.tree, sep="/"
      )
    except Exception as error:  # Orbax documents no exception types
      raise ValueError(
        f"{path} is not a complete checkpoint: {error}"
      ) from error
    names.check(
      expected, {name: leaf.shape for name, leaf in metadata.items()}, str(path)
    )
    by_name = traverse_util.flatten_dict(shardings or {}, sep="/")
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = {
      name: jax.ShapeDtypeStruct(
        shape,
        jnp.dtype(config.format_of(name).kind),
        sharding=by_name.get(name, device),
      )
      for name, shape in expected.items()
    }
    try:
      return checkpointer.restore(
        path, traverse_util.unflatten_dict(shapes, sep="/")
      )
    except Exception as error:
      raise ValueError(f"{path} cannot be read: {error}") from error
