"""Says which names there are where one is unknown."""

import difflib
from collections.abc import Iterable


def choices(name: str, known: Iterable[str]) -> str:
  """Lists the known names, those that come close to `name` first."""
  known = list(known)
  close = difflib.get_close_matches(str(name), known)
  hint = f"did you mean {' or '.join(close)}? " if close else ""
  return f"{hint}known: {', '.join(known)}"
