"""The flags of files of prompts, and of the folder that keeps their results.

Shared by the programs that decode many prompts and may be killed meanwhile.
"""

import zlib
from pathlib import Path

from specdec.benchmark import prompts
from specdec.benchmark.catalog import Target
from specdec.cli import app, setup_flags
from specdec.cli.app import Flags, Options
from specdec.training import saving
from specdec.types import PyTree
from specdec.utils import files


def define(flags: Flags) -> None:
  """Defines them."""
  flags.integer("limit", 0, "Prompts of each category, 0 for all of them.")
  flags.integer(
    "max_prompt_tokens", 0, "Leave out longer prompts, 0 for none of them."
  )
  flags.string(
    "output",
    None,
    "Folder of the results; a run that was stopped goes on from what it holds.",
  )


def read(options: Options) -> Path:
  """Checks them, and takes the folder, before models are loaded."""
  if getattr(options, "distributed", False):
    raise ValueError("--distributed is for generate, bench, sweep and train")
  if not (options.prompt_file and options.output):
    raise ValueError("give --prompt_file and --output")
  app.check_at_least(options, 0, "limit", "max_prompt_tokens")
  return app.take_folder("--output", options.output)


def corpus(options: Options, target: Target) -> prompts.Corpus:
  """Reads the prompts that are wanted."""
  checkpoint = target.checkpoint
  setup_flags.check_chat(options, checkpoint.tokenizer)
  everything = prompts.read_corpus(
    options.prompt_file,
    checkpoint.tokenizer,
    options.chat,
    checkpoint.config.vocab_size,
  )
  return everything.select(options.limit, options.max_prompt_tokens)


def claim(folder: Path, header: dict, params: PyTree, encoded) -> None:
  """Refuses a folder of other settings, prompts, weights or machines."""
  machine = {k: v for k, v in header["machine"].items() if k != "load"}
  files.claim(
    folder,
    header["settings"]
    | {
      "prompt_checksum": zlib.crc32(repr(encoded).encode()),
      "weight_checksum": saving.checksum(params),
      "versions": header["versions"],
      "machine": machine,
    },
    setup_flags.FREE,
  )
