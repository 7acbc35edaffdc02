"""Folders of runs, by name or by pattern."""

import glob
from pathlib import Path


def named(patterns: list[str]) -> list[Path]:
  """The folders that are meant, each once.

  Raises:
    ValueError: one of the patterns means none.
  """
  found: dict[Path, None] = {}
  for pattern in patterns:
    folders = [Path(x) for x in sorted(glob.glob(pattern)) if Path(x).is_dir()]
    if not folders:
      raise ValueError(f"{pattern} names no folder")
    found |= dict.fromkeys(folders)
  return list(found)
