"""Files of prompts, and the folder that keeps what became of them.

Shared by the programs that decode many prompts and may be killed meanwhile.
"""

import collections
import sys
import zlib
from pathlib import Path

import _limit
import _main
import _mesh
import _output
from absl import flags

from specdec.benchmark import prompts
from specdec.training import saving
from specdec.utils import files, terminal

# What does not change the results: where they are kept, how they are written.
_FREE = ("output", "compilation_cache", *_mesh.PROCESSES)

_BEFORE = set(flags.FLAGS)
flags.DEFINE_integer(
  "max_prompt_tokens", 0, "Leave out longer prompts, 0 for none of them."
)
FLAGS = flags.FLAGS
for _module in (_limit, _output):
  flags.adopt_module_key_flags(_module)
OWN = sorted({*FLAGS} - _BEFORE | {"limit", "output"})


def check_flags() -> None:
  """Refuses what cannot work, before models are loaded."""
  if FLAGS.distributed:
    raise ValueError("--distributed is for generate, bench, sweep and train")
  if not (FLAGS.prompt_file and FLAGS.output):
    raise ValueError("give --prompt_file and --output")
  _limit.check_flags()
  if FLAGS.max_prompt_tokens < 0:
    raise ValueError(
      f"--max_prompt_tokens={FLAGS.max_prompt_tokens}; it must be >= 0"
    )
  for file in FLAGS.prompt_file:
    prompts.scan(file)  # is there any?
  _main.take_folder("--output", FLAGS.output)


def group_of(prompt: prompts.Prompt) -> str:
  """The category that a prompt is counted under."""
  if prompt.category == "all":  # taken: the sum of all groups
    return "all (category)"
  return prompt.category


def read_prompts(target) -> tuple[list[list[int]], list[prompts.Prompt], list]:
  """Token ids and prompts, and a sentence for each line that holds none."""
  encoded, found, broken = [], [], []
  for file in FLAGS.prompt_file:
    good, bad = prompts.scan(file)
    broken += bad
    for prompt in good:
      try:
        encoded += prompts.encode(
          [prompt], target.tokenizer, FLAGS.chat, target.config.vocab_size
        )
        found.append(prompt)
      except ValueError as error:
        broken.append(f"{prompt.name}: {error}")
  for line in broken:
    terminal.report(f"skipped: {line}", file=sys.stderr)
  if not found:
    raise ValueError("no prompt is left")
  return encoded, found, broken


def choose(encoded, groups) -> tuple[list[int], int]:
  """The first --limit prompts of every group that are short enough, and how
  many were too long."""
  kept, counts, too_long = [], collections.Counter(), 0
  for i, (ids, group) in enumerate(zip(encoded, groups)):
    if FLAGS.max_prompt_tokens and len(ids) > FLAGS.max_prompt_tokens:
      too_long += 1
      continue
    counts[group] += 1
    if not FLAGS.limit or counts[group] <= FLAGS.limit:
      kept.append(i)
  if not kept:
    raise ValueError(
      f"no prompt has --max_prompt_tokens={FLAGS.max_prompt_tokens} or fewer"
    )
  return kept, too_long


def claim(folder: Path, header: dict, models, encoded) -> None:
  """The folder is of these settings, prompts, weights, versions and machine."""
  machine = {k: v for k, v in header["machine"].items() if k != "load"}
  files.claim(
    folder,
    header["settings"]
    | {
      "prompt_checksum": zlib.crc32(repr(encoded).encode()),
      "weight_checksum": saving.checksum(models.params),
      "versions": header["versions"],
      "machine": machine,
    },
    _FREE,
  )
