"""Flags that name a Python file whose get_config() gives a ConfigDict."""

import pathlib
import re
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from specdec.utils.spelling import choices

_SHIPPED = pathlib.Path(__file__).parents[2] / "configs"


def define(
  name: str,
  text: str,
  shipped: str,
  flag_values: flags.FlagValues,
  argv: Sequence[str],
) -> None:
  """Defines such a flag; whatever is wrong with the file is one sentence.

  Args:
    shipped: matches the files in configs/ that it takes.
    argv: the whole command line, in which --NAME.ENTRY=VALUE is looked for.
  """
  config_flags.DEFINE_config_file(
    name, None, text, flag_values=flag_values, sys_argv=list(argv)
  )
  parser = flag_values[name].parser
  load = type(parser).parse

  def parse(path: str) -> ConfigDict:
    file = pathlib.Path(path.partition(":")[0])
    if not file.is_file():
      valid = sorted(map(str, _SHIPPED.glob(shipped)))
      raise ValueError(f"there is no such file; {choices(path, valid)}")
    try:
      config = load(parser, path)
    except Exception as error:  # a config raises what any program does
      if str(error).startswith("Error whilst parsing"):  # with a traceback
        error = error.__context__
      lines = str(error).strip().splitlines() or [""]
      raise ValueError(
        f"its get_config() cannot be used: {type(error).__name__}: {lines[-1]}"
      ) from error
    if not isinstance(config, ConfigDict):
      raise ValueError(
        f"its get_config() gives a {type(config).__name__}; it must be a "
        "ConfigDict"
      )
    _check_overrides(name, config, flag_values, argv)
    return config

  parser.parse = parse


def _check_overrides(name: str, config: ConfigDict, flag_values, argv) -> None:
  """Raises IllegalFlagValueError where --NAME.PATH names no entry."""
  for argument in flag_values.read_flags_from_files(argv, force_gnu=False):
    match = re.match(rf"--?(?:no)?{name}\.([^=]+)", argument)
    holder = config
    for field in config_path.split(match[1]) if match else ():
      try:
        if not isinstance(holder, ConfigDict | list | tuple):
          raise TypeError
        holder = holder[field]
      except (IndexError, KeyError, TypeError):
        nested = isinstance(holder, ConfigDict)
        valid = choices(field, holder) if nested else f"no entry {field!r}"
        raise flags.IllegalFlagValueError(
          f"--{name}.{match[1]}: {valid}"
        ) from None


def parsed(flag: flags.Flag, value, source: str = "--config"):
  """Parses a config's value as the command line would have given it.

  Args:
    source: names the config, or the part of it, in errors.

  Raises:
    ValueError: the flag takes no such value.
  """
  several = isinstance(flag, flags.MultiFlag)
  values = value if several and isinstance(value, list | tuple) else [value]
  try:
    if value is None and flag.default is not None:
      raise ValueError("leave it out for its default")
    text = flag.flag_type() in ("string", "multi string")
    if text and not all(isinstance(x, str | None) for x in values):
      raise ValueError("it must be a text")
    done = [x if x is None else flag.parser.parse(x) for x in values]
  except (TypeError, ValueError, OverflowError) as error:
    raise ValueError(
      f"{source} sets {flag.name} = {value!r:.60}: {error}"
    ) from None
  return done if several else done[0]
