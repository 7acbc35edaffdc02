"""Small models shipped with the package: a target and drafters for it.

They allow every example to run without a download. specdec/shipped/README.md
documents their training.
"""

from pathlib import Path

from specdec.utils import remote
from specdec.utils.spelling import choices

FOLDER = Path(__file__).parent.parent / "shipped"
TARGET, DRAFT = "stdlib-11m", "stdlib-1m"
# An encoder-decoder that writes docstrings for functions, and bodies.
T5, T5_DRAFT = "stdlib-t5-5m", "stdlib-t5-0.5m"
# Of TARGET's shape, trained for longer and on more; what is measured in
# docs/results is of TARGET.
LONGER, LONGER_DRAFT = "python-11m", "python-1m"
DRAFTS = {TARGET: DRAFT, LONGER: LONGER_DRAFT, T5: T5_DRAFT}
TOKENIZER = FOLDER / "tokenizer.json"  # of all of them
# The beginning of a Python function that is in none of the training data, three
# that read well, and 32 of them in JSON lines.
PROMPT, FIRST = FOLDER / "prompt.txt", FOLDER / "first.jsonl"
PROMPTS = FOLDER / "prompts.jsonl"
# Layers of TARGET to skip in drafting, chosen by choose_layers.py.
SKIP = FOLDER / "drafters" / "skip.json"
# Of the trained drafters, those whose target is another, which is fetched.
_OF_OTHERS = {"smollm2": "smollm2-135m-instruct"}


def about(name: str) -> str:
  """Returns a sentence on what a shipped model can and cannot do, or ''."""
  if name not in names():
    return ""
  if name in (T5, T5_DRAFT):
    return (
      f"{name} writes docstrings and bodies of Python functions, and is too "
      "small to understand them"
    )
  read = "saw the standard library once"
  if name in (LONGER, LONGER_DRAFT):
    read = "saw nine million tokens of it once"
  return (
    f"{name} continues Python source and nothing else: it is small, {read}, "
    "and was never taught to answer"
  )


def prompts_of(folder: str | Path) -> Path:
  """Returns the prompts for a model: those in its folder, or PROMPTS."""
  own = Path(folder) / "docstring.jsonl"
  return own if own.is_file() else PROMPTS


def drafters(target: str | None = None) -> list[str]:
  """Lists the trained drafters, or those for a target.

  `drafter` returns their files.
  """
  names = sorted(path.stem for path in FOLDER.glob("drafters/*.safetensors"))
  if target is None:
    return names
  return [x for x in names if _OF_OTHERS.get(x, TARGET) == target]


def drafter(name: str) -> Path:
  """Returns the file of a drafter, by name or path; or FileNotFoundError."""
  if name in drafters():
    return FOLDER / "drafters" / f"{name}.safetensors"
  remote.check_local("", name)
  path = Path(name).expanduser()
  if not path.is_file():
    raise FileNotFoundError(
      f"no such drafter as {name!r}; {choices(name, drafters())}, a file of "
      "train.py, or a folder or a name on the hub in a format of others"
    )
  return path


def names() -> list[str]:
  """Lists the shipped models, for `fetch`."""
  return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
