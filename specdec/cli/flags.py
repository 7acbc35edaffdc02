"""The flags of one program: absl's, integers and files of a config."""

import copy
import pathlib
import re
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from specdec.utils.spelling import choices

flags.disclaim_key_flags()  # flags belong to the modules that call Flags
_SHIPPED = pathlib.Path(__file__).parents[2] / "configs"
_MOST = 10_000  # integers of one flag
ADAPTIVE = ("adaptive",)  # what is no number


class Integers(flags.ArgumentParser):
  """An integer or several, as a tuple: 4, or 1,2,4-8; if accepted also auto,
  (), and adaptive, ADAPTIVE."""

  def __init__(self, auto: bool = False):
    self._auto = auto
    also = "; or auto, or adaptive" if auto else ""
    self.syntactic_help = f"an integer, or several: 1,2,4-8{also}"

  def parse(self, argument) -> tuple[int, ...]:
    """'1,2,4-6' as (1, 2, 4, 5, 6), each once; numbers stay as they are."""
    if self._auto and argument == "auto":
      return ()
    if self._auto and argument in ("adaptive", ADAPTIVE):
      return ADAPTIVE
    if isinstance(argument, int):
      return (argument,)
    if isinstance(argument, list | tuple):
      if argument and all(type(x) is int for x in argument):
        return tuple(dict.fromkeys(argument))
    elif isinstance(argument, str):
      return self._read(argument)
    raise ValueError(f"{argument!r:.60} is no integer and no list of them")

  def _read(self, argument: str) -> tuple[int, ...]:
    if argument in ("auto", *ADAPTIVE):
      raise ValueError(
        f"{argument} is for --k of generate.py and bench.py; give numbers like "
        "4 or 1,2,4-8"
      )
    numbers: list[int] = []
    for part in argument.split(","):
      match = re.fullmatch(r"(-?\d{1,9})(?:-(\d{1,9}))?", part.strip())
      low, high = match.groups() if match else ("1", "0")
      span = range(int(low), int(high or low) + 1)
      if not span:
        raise ValueError(
          f"{argument!r:.60} is no list of integers like 4 or 1,2,4-8"
        )
      if len(numbers) + len(span) > _MOST:
        raise ValueError(f"{argument!r:.60} gives more than {_MOST:,} integers")
      numbers += span
    return tuple(dict.fromkeys(numbers))

  def flag_type(self) -> str:
    return "integers"


def _method(define: Callable[..., object]) -> Callable[..., None]:
  """Returns a method that takes what an absl function does, a name first."""

  def method(self, name: str, *args, **options) -> None:
    if name not in self._left_out:
      define(name, *args, flag_values=self.values, **options)

  return method


class Flags:
  """Defines the flags of one program, each with a name, a default and a text.

  Attributes:
    values: the absl flags; they are parsed by calling it.
  """

  def __init__(self, argv: Sequence[str]):
    self.values, self._argv = flags.FlagValues(), list(argv)
    self._left_out: frozenset[str] = frozenset()

  def without(self, names: Sequence[str]) -> "Flags":
    """Returns these flags, to which none of these names is added."""
    other = copy.copy(self)
    other._left_out = self._left_out | frozenset(names)
    return other

  def integers(
    self, name: str, default: str | None, text: str, auto: bool = False
  ) -> None:
    """One integer or several: 4, or 1,2,4-8; with auto also words."""
    if name not in self._left_out:
      form = Integers(auto), name, default, text
      serializer = flags.CsvListSerializer(",")
      flags.DEFINE(*form, flag_values=self.values, serializer=serializer)

  def config(self, name: str, text: str, shipped: str = "*.py") -> None:
    """A Python file whose get_config() gives a ConfigDict, as those in configs/
    that `shipped` matches. Whatever is wrong with it is one sentence."""
    config_flags.DEFINE_config_file(
      name, None, text, flag_values=self.values, sys_argv=self._argv
    )
    parser = self.values[name].parser
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
        kind, lines = type(error).__name__, str(error).strip().splitlines()
        raise ValueError(
          f"its get_config() cannot be used: {kind}: {(lines or [''])[-1]}"
        ) from error
      if not isinstance(config, ConfigDict):
        raise ValueError(
          f"its get_config() gives a {type(config).__name__}; it must be a "
          "ConfigDict"
        )
      self._check_overrides(name, config)
      return config

    parser.parse = parse

  def _check_overrides(self, name: str, config: ConfigDict) -> None:
    """Raises IllegalFlagValueError where --NAME.PATH names no entry."""
    arguments = self.values.read_flags_from_files(self._argv, force_gnu=False)
    for argument in arguments:
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

  string = _method(flags.DEFINE_string)
  integer = _method(flags.DEFINE_integer)
  float = _method(flags.DEFINE_float)
  bool = _method(flags.DEFINE_bool)
  list = _method(flags.DEFINE_list)  # texts with commas between them
  enum = _method(flags.DEFINE_enum)  # the accepted texts behind the default
  strings = _method(flags.DEFINE_multi_string)  # may be repeated


def parsed(flag: flags.Flag, value):
  """Parses a config's value as the command line would have given it."""
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
      f"--config sets {flag.name} = {value!r:.60}: {error}"
    ) from None
  return done if several else done[0]
