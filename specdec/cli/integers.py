"""Flags that take an integer or several: 4, or 1,2,4-8."""

import re

from absl import flags

_MOST = 10_000  # integers of one flag


def parse_integers(given) -> tuple[int, ...]:
  """'1,2,4-6' as (1, 2, 4, 5, 6), each once; numbers are taken as they are.

  Raises:
    ValueError: it says no integers, or absurdly many.
  """
  if isinstance(given, int):
    return (given,)
  if not isinstance(given, str):
    if not isinstance(given, list | tuple):
      raise ValueError(f"{given!r:.60} is no integer and no list of them")
    return tuple(dict.fromkeys(int(x) for x in given))
  numbers: list[int] = []
  for part in given.split(","):
    match = re.fullmatch(r"(-?\d{1,9})(?:-(\d{1,9}))?", part.strip())
    low, high = match.groups() if match else ("1", "0")
    span = range(int(low), int(high or low) + 1)
    if not span:
      raise ValueError(
        f"{given!r:.60} is no list of integers like 4 or 1,2,4-8"
      )
    if len(numbers) + len(span) > _MOST:
      raise ValueError(f"{given!r:.60} gives more than {_MOST:,} integers")
    numbers += span
  return tuple(dict.fromkeys(numbers))


class Integers(flags.ArgumentParser):
  """--k=4, --k=1,2,4, --k=1-8."""

  syntactic_help = "an integer, or several: 1,2,4-8"

  def parse(self, argument):
    return parse_integers(argument)

  def flag_type(self):
    return "integers"


class IntegersOrAuto(Integers):
  """The same, or --k=auto."""

  syntactic_help = "an integer, or several: 1,2,4-8; or auto"

  def parse(self, argument):
    return () if argument == "auto" else parse_integers(argument)
