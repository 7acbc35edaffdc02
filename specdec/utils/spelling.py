"""Formats names for error messages."""

import difflib
from collections.abc import Iterable


def choices(name: str, valid: Iterable[str]) -> str:
  """Lists the valid names, after those that resemble `name`."""
  valid = list(valid)
  close = difflib.get_close_matches(str(name), valid)
  hint = f"did you mean {' or '.join(close)}? " if close else ""
  return f"{hint}known: {', '.join(valid)}"


def join_names(names: Iterable[str], limit: int = 3) -> str:
  """Joins the first `limit` names and counts the rest: 'a, b, c and 4 more'."""
  names = list(names)
  text = ", ".join(names[:limit])
  rest = len(names) - limit
  return text if rest <= 0 else f"{text} and {rest} more"
