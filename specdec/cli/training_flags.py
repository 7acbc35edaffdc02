"""The flags that all programs have that train: --config and --folder."""

from typing import TypeVar

from specdec.cli.app import Flags, Options
from specdec.training import setup as setups

Setup = TypeVar("Setup", bound=setups.FromConfig)


def define(flags: Flags) -> None:
  """Defines them."""
  flags.config(
    "config",
    "File whose get_config() says what to train, on what, how.",
    "train/*.py",
  )
  flags.string("folder", None, "Folder of the run.")


def read(options: Options, kind: type[Setup]) -> Setup:
  """Returns what --config describes, its entries checked.

  Raises:
    ValueError: it is not given, or describes nothing of this kind.
  """
  if options.config is None:
    raise ValueError("give --config, as configs/train/target.py")
  return kind.from_config(options.config.to_dict())
