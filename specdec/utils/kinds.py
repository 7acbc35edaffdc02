"""Checks values that come from text against the annotations they are for."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any

_WORDS = {
  int: "an integer below 2**31",
  float: "a number",
  str: "a text",
  bool: "a bool",
  types.NoneType: "None",
}
_LISTS = (list, tuple, Sequence)


def alternatives(hint: Any) -> tuple:
  """Returns the types of a union; of another annotation, itself alone."""
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if is_union else (hint,)


def check(name: str, value: Any, hint: Any) -> None:
  """Raises ValueError, which begins with `name`, unless a value is of a type.

  Args:
    hint: an annotation. An integer is a number, too, and no bool is; lists are
      checked by their members, and what is no plain value is of any type.
  """
  if not _fits(value, hint):
    *most, last = map(_word, alternatives(hint))
    words = f"{', '.join(most)} or {last}" if most else last
    raise ValueError(f"{name} = {value!r:.60}; it must be {words}")


def _fits(value: Any, hint: Any) -> bool:
  if (choices := alternatives(hint)) != (hint,):
    return any(_fits(value, choice) for choice in choices)
  if hint is int:
    return type(value) is int and abs(value) < 2**31
  if hint is float:
    return type(value) is float or _fits(value, int)
  if hint in _WORDS:
    return type(value) is hint
  if _is_list(hint):
    members = typing.get_args(hint)[:1]
    return isinstance(value, (list, tuple)) and all(
      _fits(x, member) for x in value for member in members
    )
  return not isinstance(hint, type) or isinstance(value, hint)


def _is_list(hint: Any) -> bool:
  return (typing.get_origin(hint) or hint) in _LISTS


def _word(hint: Any) -> str:
  if _is_list(hint):
    return "a list"
  if dataclasses.is_dataclass(hint):
    return "a mapping"  # in a config
  return _WORDS.get(hint, str(hint))
