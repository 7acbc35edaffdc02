"""What every program here does around its own work.

Errors that a user can mend end in one sentence, everything else in a traceback.
"""

import logging
import sys
from collections.abc import Callable

from absl import app
from absl import logging as absl_logging

# What a user can mend. FloatingPointError: a measurement that cannot be true.
_MENDABLE = (ValueError, TypeError, OSError, MemoryError, FloatingPointError)


def main_of(
  name: str, work: Callable[[], None], interrupted: str = "stopped"
) -> Callable[[list[str]], None]:
  """`main` for absl: runs `work`, which takes no argument.

  Args:
    interrupted: what is said after Ctrl-C.
  """

  def main(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
      work()
    except _MENDABLE as error:
      sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
      sys.exit(f"{name}: {interrupted}")

  return main


def start(main: Callable[[list[str]], None]) -> None:
  """Runs a program, without the chatter of libraries."""
  # Which backends are absent is no news to whoever runs this.
  logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
  absl_logging.set_verbosity(absl_logging.WARNING)  # Orbax tells a lot
  app.run(main)
