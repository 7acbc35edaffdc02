"""The small models inside the package: a target, and drafts for it.

They are there so that everything can be tried without a download; each has a
card beside it that says what it was trained on and how.
"""

from pathlib import Path

from specdec.utils.spelling import choices

FOLDER = Path(__file__).parent.parent / "shipped"
TARGET, DRAFT = "stdlib-11m", "stdlib-1m"
# Python that none of them was trained on: the beginning of a function.
PROMPT = FOLDER / "prompt.txt"
# 32 of the same kind, a JSON object a line.
PROMPTS = FOLDER / "prompts.jsonl"

# What choose_layers.py found best to leave out of TARGET.
SKIP = FOLDER / "drafters" / "skip.json"


def drafters() -> list[str]:
  """Learned drafters for TARGET: `drafter` gives their files."""
  return sorted(path.stem for path in FOLDER.glob("drafters/*.safetensors"))


def drafter(name: str) -> Path:
  """The file of a learned drafter: of one that is shipped, else `name`.

  Raises:
    FileNotFoundError: there is neither.
  """
  if name in drafters():
    return FOLDER / "drafters" / f"{name}.safetensors"
  path = Path(name).expanduser()
  if not path.is_file():
    raise FileNotFoundError(
      f"no such drafter as {name!r}; {choices(name, drafters())}, or a file of "
      "train_drafter.py"
    )
  return path


def names() -> list[str]:
  """What `fetch` finds here."""
  return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
