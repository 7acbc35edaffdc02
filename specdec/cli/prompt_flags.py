"""The flags of files of prompts, and of the folder that keeps their results.

Shared by the programs that decode many prompts and may be killed meanwhile.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec.benchmark import prompts, results, rows
from specdec.benchmark.target import Target
from specdec.checkpoints import Checkpoint, shipped
from specdec.cli import app, setup_flags
from specdec.cli.app import Flags, Options
from specdec.report import canvas
from specdec.training import saving
from specdec.types import PyTree
from specdec.utils import files, run_folder, terminal

_PROGRAM = "python scripts/generate.py"
_CHAT = f"""\
  # a model that answers, 98 MB once
  {_PROGRAM} --target=smollm2-135m-instruct --chat \\
    --drafter=quantized --k=6 --prompt='Why is it dark at night?'"""


def define(flags: Flags) -> None:
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
  if not options.prompt_file:
    raise ValueError(f"give --prompt_file, such as {shipped.PROMPTS}")
  app.check_at_least(options, 0, "limit", "max_prompt_tokens")
  return app.take_folder("--output", options.output)


def check_prompt(options: Options) -> None:
  """Raises ValueError for a --prompt that is empty, not UTF-8, given twice, or
  one of two sources of prompts."""
  text = options.prompt
  if options.parsers["prompt"].present > 1:
    raise ValueError("give --prompt once; several go into a --prompt_file")
  if text is not None and options.prompt_file:
    raise ValueError("give --prompt or --prompt_file, not both")
  if text == "":
    raise ValueError("--prompt is empty; give some text")
  if text and re.search(r"[\ud800-\udfff]", text):
    raise ValueError("--prompt is not UTF-8")


def corpus(options: Options, target: Target) -> prompts.Corpus:
  """Reads the prompts that are wanted."""
  checkpoint = target.checkpoint
  setup_flags.check_chat(options, checkpoint.tokenizer)
  return prompts.read_corpus(
    options.prompt_file,
    checkpoint.tokenizer,
    options.chat,
    checkpoint.config.vocab_size,
    options.limit,
    options.max_prompt_tokens,
  )


def encode(
  options: Options, checkpoint: Checkpoint, limit: int = 0
) -> list[list[int]]:
  """Token ids of --prompt, of at most so many prompts of --prompt_file, 0 for
  all, or of `beginnings`."""
  tokenizer = checkpoint.tokenizer
  setup_flags.check_chat(options, tokenizer)
  if options.prompt_file:
    wanted = [p for file in options.prompt_file for p in prompts.read(file)]
    wanted = wanted[: limit or None]
  elif options.prompt is not None:
    wanted = [prompts.Prompt(text=options.prompt)]
  elif tokenizer is None:
    wanted = [prompts.Prompt(token_ids=tuple(range(16)))]
    app.note("no --prompt and no tokenizer: tokens 0 to 15")
  else:
    texts = beginnings(options, checkpoint)
    wanted = [prompts.Prompt(text=text) for text in texts]
  size = checkpoint.config.vocab_size
  return prompts.encode(wanted, tokenizer, options.chat, size)


def beginnings(options: Options, checkpoint: Checkpoint) -> list[str]:
  """Returns the texts that are completed where no prompt is given, else []."""
  given = options.prompt_file or options.prompt is not None
  if given or checkpoint.tokenizer is None:
    return []
  if not checkpoint.config.encoder_layers:
    return [x.text for x in prompts.read(shipped.FIRST)]
  return [prompts.read(shipped.prompts_of(checkpoint.source))[0].text]


def remarks(
  options: Options, checkpoint: Checkpoint, encoded: list[list[int]]
) -> list[str]:
  """Returns what a user of a model should know of it, a sentence each, and
  what to try after a first look."""
  lines = []
  if sentence := shipped.about(options.target):
    lines.append(f"{sentence}.")
  longest = max(map(len, encoded)) + options.max_new_tokens
  trained = checkpoint.trained_length
  if trained and longest > trained:
    lines.append(
      f"{options.target} was trained on {trained:,} positions, these texts "
      f"have up to {longest:,}: beyond, what it writes may mean nothing."
    )
  if beginnings(options, checkpoint):
    lines.append(_next(options))
  return lines


def _next(options: Options) -> str:
  """Returns commands to try next, without what was just done."""
  target = ""
  if options.target != shipped.TARGET:
    target = f" --target={options.target}"
  steps = [
    (
      options.temperature > 0,
      "sampled text, still of the target's distribution",
      "--temperature=0.8",
    ),
    (
      "quantized" in (options.drafter or ""),
      "the target drafts for itself, in int8",
      "--drafter=quantized --k=8",
    ),
    (
      bool(options.html),
      "every token's story, round by round",
      "--html=page.html",
    ),
  ]
  lines = [
    f"  # {gain}\n  {_PROGRAM}{target} {flags}"
    for is_done, gain, flags in steps
    if not is_done
  ]
  return "\n".join(["Next:", *lines, _CHAT])


def claim(
  folder: Path,
  header: dict,
  params: PyTree,
  encoded,
  free: Sequence[str] = setup_flags.FREE,
) -> files.Lines:
  """Refuses a folder of other settings, prompts, weights or machines; returns
  what it holds already.

  Args:
    encoded: token ids of the prompts.
    free: settings that may change when a run is resumed.
  """
  machine = {k: v for k, v in header["machine"].items() if k != "load"}
  run_folder.claim(
    folder,
    header["settings"]
    | {
      "prompt_checksum": zlib.crc32(repr(encoded).encode()),
      "weight_checksum": saving.checksum(params),
      "versions": header["versions"],
      "machine": machine,
    },
    free,
  )
  return files.Lines(folder / "lines.jsonl")


def publish(
  folder: Path,
  document: dict,
  text: str,
  title: str,
  plot: Callable,
  json: str | None = None,
) -> None:
  """Prints the table, and writes table.txt, results.json, also as `json`, and
  the plot of runs, title and caveats."""
  terminal.report(text)
  files.replace_text(folder / "table.txt", text + "\n")
  for path in (str(folder / "results.json"), json):
    if path:
      results.write_json(path, document)
  figure = plot(document["runs"], title, document["caveats"])
  canvas.save(figure, folder / "plot.png")
  app.note(f"results: {folder}/results.json, table.txt, plot.png")


def given_or_held_out(
  options: Options, checkpoint: Checkpoint
) -> list[list[int]]:
  """Returns token ids of --prompt_file, or of what `bench` decodes."""
  if options.prompt_file:
    return encode(options, checkpoint, options.limit)
  source = rows.Source(checkpoint, seed=options.seed)
  wanted = max(options.batch), options.context, options.limit
  batches = rows.make_batches(source, *wanted)
  app.note(batches.description)
  return [ids for batch in batches.batches for ids in batch.rows]
