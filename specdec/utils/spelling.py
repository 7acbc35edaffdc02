"""Error messages that list names and sources."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping


def choices(name: str, valid: Iterable[str]) -> str:
  """Lists the valid names, after those that resemble `name`."""
  valid = list(valid)
  return f"{hint(name, valid)}known: {', '.join(valid)}"


def hint(name: str, valid: Iterable[str]) -> str:
  """Returns a question that names what resembles `name`, or ''."""
  close = difflib.get_close_matches(str(name), valid)
  return f"did you mean {' or '.join(close)}? " if close else ""


def check_choice(
  what: str,
  value: object,
  valid: Iterable[str],
  verdict: str = " is unknown; known",
) -> None:
  """Raises ValueError unless `value`, of any type, is a valid name."""
  if value not in (names := tuple(valid)):
    raise ValueError(f"{what} {value!r}{verdict}: {', '.join(names)}")


@contextlib.contextmanager
def naming(
  source: str, keys: Mapping[str, str] | None = None
) -> Iterator[None]:
  """Begins the message of a ValueError with the source, unless it does.

  Args:
    keys: field -> what the source calls it. Fields of which a message gives the
      value, as `field = 3`, are renamed.
  """
  try:
    yield
  except ValueError as error:
    if str(error).startswith(source):
      raise
    names = keys or {}
    text = re.sub(
      r"(?<![\w.])(\w+)(?= = )", lambda x: names.get(x[1], x[1]), str(error)
    )
    raise ValueError(f"{source}: {text}") from error


def join_names(names: Iterable[str]) -> str:
  """Joins the first three names and counts the rest: 'a, b, c and 4 more'."""
  names = list(names)
  text = ", ".join(names[:3])
  rest = len(names) - 3
  return text if rest <= 0 else f"{text} and {rest} more"
