"""Checks of numbers in the configs of models."""

import math
import numbers


def check_counts(config, *names: str) -> None:
  """Raises ValueError unless these fields are integers of at least one."""
  for name in names:
    value = getattr(config, name)
    count = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not count or value < 1:
      raise ValueError(f"{name} = {value!r}; it must be an integer >= 1")


def check_positive(
  config, *names: str, optional: bool = False, every: bool = False
) -> None:
  """Raises ValueError unless these fields are finite and above zero.

  Args:
    optional: None is valid as well.
    every: the fields are tuples of such numbers.
  """
  for name in names:
    field = getattr(config, name)
    for value in field if every else (field,):
      if value is None and optional:
        continue
      if not (isinstance(value, numbers.Real) and 0 < value < math.inf):
        or_none = "None or " if optional else ""
        raise ValueError(
          f"{name} = {value!r}; it must be {or_none}finite and > 0"
        )
