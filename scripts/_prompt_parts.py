"""Prompts to train on, and those kept back, as the files of one folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import _main
from absl import flags

from specdec.utils import files, terminal

flags.DEFINE_integer(
  "every", 20, "Every so manyth goes to held_out.jsonl instead; 0: none."
)
FLAGS = flags.FLAGS


def check_flags() -> None:
  """Refuses what cannot work, before anything is read; takes the folder."""
  if FLAGS.every < 0:
    raise ValueError(f"--every={FLAGS.every}; it must be >= 0")
  _main.take_folder("--output", FLAGS.output)


def write(folder: Path, lines: Sequence[dict]) -> None:
  """Writes prompts.jsonl and held_out.jsonl and says how many each has."""
  parts = {"prompts": [], "held_out": []}
  for i, line in enumerate(lines, 1):
    kept = FLAGS.every and i % FLAGS.every == 0
    parts["held_out" if kept else "prompts"].append(json.dumps(line) + "\n")
  for name, part in parts.items():
    path = folder / f"{name}.jsonl"
    files.replace_text(path, "".join(part))
    terminal.report(f"{len(part)} prompts: {path}")
