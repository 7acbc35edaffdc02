"""Describes one measurement: a program with its flags, and what it needs.

Flags that several measurements share stand here too.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HELD_OUT = "--prompt_file=specdec/shipped/prompts.jsonl"
PAIR = "--drafter=model(stdlib-1m)"
SAMPLED = "--temperature=1 --acceptance=rejection"
SMOLLM2 = "--target=smollm2-135m-instruct"
# Who decides how much to draft; AdaEDL, of drafts with a distribution.
DECIDED = "--length=auto --length=adaptive"
ADAEDL = "--length=entropy(limit=0.4)"
TEXTS = f"{SMOLLM2} --chat --prompt_file={{prompts}} --max_new_tokens=128"
_LISTS = "--length", "--prompt_file"  # flags that are given once a value
_FOLDERS = "eval", "repeat_work", "compare_drafters", "compare_rules", "sweep"


class Measurement(NamedTuple):
  """A command, and where its results come from.

  Attributes:
    name: of its file in results/.
    line: a program of scripts/ and its flags, as one types them, but for the
      one that says where results go; {prompts} stands for a file of prompts of
      four kinds, {results} for the folder of all results.
    minutes: about how long it takes on two CPU cores.
    quick: flags of a quick run, which take the place of those of that name;
      None: a quick run leaves it out, as another like it is there.
    flag: the one that says where results go; '': --output, a folder, of the
      programs that write one, else --json.
    environment: NAME=VALUE, by which the command differs from others.
    needs: modules and files without which it cannot run, each with how to get
      it.
    apart: it takes long and runs where it is named, not with all.
  """

  name: str
  line: str
  minutes: float
  quick: str | None = None
  flag: str = ""
  environment: str = ""
  needs: Sequence[tuple[str, str]] = ()
  apart: bool = False

  @property
  def program(self) -> str:
    """Its name in scripts/."""
    return self.line.partition(" ")[0]

  @property
  def to(self) -> str:
    """The flag that says where results go."""
    return self.flag or ("output" if self.program in _FOLDERS else "json")

  def argv(self, results: Path, prompts: str, quick: bool) -> list[str]:
    """Returns the flags of a run: the last of each name, and all of _LISTS."""
    quick_flags = (quick and self.quick) or ""
    _, *flags = shlex.split(f"{self.line} {quick_flags}")
    names = [flag.partition("=")[0] for flag in flags]
    once = {
      (flag if name in _LISTS else name): flag
      for name, flag in zip(names, flags)
    }
    places = {"{results}": str(results), "{prompts}": prompts}
    pattern = "|".join(map(re.escape, places))
    return [re.sub(pattern, lambda x: places[x[0]], x) for x in once.values()]

  def command(self, argv: Iterable[str]) -> str:
    """Returns what one would type."""
    command = ["python", f"scripts/{self.program}.py", *argv]
    return f"{self.environment} {shlex.join(command)}".strip()

  def missing(self) -> str:
    """Says what it needs and is not there, or nothing."""
    for what, how in self.needs:
      is_module = what.isidentifier() and importlib.util.find_spec(what)
      if not (is_module or Path(what).exists()):
        return f"{what} is not here: {how}"
    return ""
