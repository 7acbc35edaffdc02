"""Decodes files of prompts and reports by category: tokens per pass, speedup.

  python scripts/eval.py --prompt_file=spec_bench.jsonl --output=runs/eval
  python scripts/eval.py --prompt_file=A.jsonl --prompt_file=B.jsonl --chat \\
    --target=smollm2-135m-instruct --k=1-8 --limit=4 --output=runs/lookup
  python scripts/eval.py --prompt_file=A.jsonl --exit_layer=3 --k=1,2,4 \\
    --output=runs/early_exit

Lines of a JSONL file are Spec-Bench's (question_id, category, turns, of which
the first is used) or plain ones (prompt, text or token_ids, and a category; the
file's name stands in for one). Spec-Bench's eight MT-bench categories count as
one, as in its paper (arXiv:2401.07851). Every prompt is decoded plainly, once,
and with each k. The output folder gets lines.jsonl as prompts finish,
then results.json (docs/schema.json), table.txt and plot.png. The same command
again goes on where it was stopped or killed.
"""

import collections
import sys
import zlib
from pathlib import Path

import _decoding
import _flags
import _main
from absl import flags
from tqdm import tqdm

from specdec import evaluation, prompts, provenance, report, run_folder
from specdec.analysis import plots
from specdec.training import saving

# What does not change the results: where they are kept, how they are written.
_FREE = ("output", "compilation_cache")

_BEFORE = set(flags.FLAGS)
flags.DEFINE_string("output", None, "Folder of the results.")
flags.DEFINE_integer("limit", 0, "Prompts of a category, 0 for all of them.")
flags.DEFINE_integer(
  "max_prompt_tokens", 0, "Leave out longer prompts, 0 for none of them."
)
FLAGS = flags.FLAGS
flags.adopt_module_key_flags(_flags)  # or --help would leave them out
_OWN = sorted(set(FLAGS) - _BEFORE)
FLAG_NAMES = [*_flags.SHARED, *_OWN]


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
    print(f"skipped: {line}", file=sys.stderr)
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


def decode(models, encoded, groups, lines) -> list[dict]:
  """Decodes whatever `lines` does not hold yet; a line for every batch."""
  batch = _flags.single("batch")
  batches = evaluation.plan(encoded, groups, batch)
  done = {tuple(line["prompts"]): line for line in lines.entries}
  sessions, size_of_sessions = {}, None
  with tqdm(total=len(encoded) * len(FLAGS.k), unit="text") as progress:
    for turn, (size, members) in enumerate(batches):
      if tuple(members) not in done:
        if size != size_of_sessions:
          progress.set_postfix_str(f"compiling for prompts up to {size} tokens")
          sessions, size_of_sessions = {}, size
          for k in FLAGS.k:
            sessions[k] = _decoding.make_session(
              models, k, batch, size, models.target.eos_ids
            )
            sessions[k].share_plain(sessions[FLAGS.k[0]])
            sessions[k].warm_up([encoded[i] for i in members])
        progress.set_postfix_str(groups[members[0]])
        line = evaluation.decode_batch(
          sessions,
          [encoded[i] for i in members],
          members,
          turn,
          _decoding.comparable(),
        )
        line |= {"date": provenance.now(), "load": provenance.load()}
        lines.append(line)
        done[tuple(members)] = line
      progress.update(len(members) * len(FLAGS.k))
  return [done[tuple(members)] for _, members in batches]


def claim(folder: Path, header: dict, models, encoded) -> None:
  """The folder is of these settings, prompts, weights, versions and machine."""
  machine = {k: v for k, v in header["machine"].items() if k != "load"}
  run_folder.claim(
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


def evaluate() -> None:
  """The whole run: check, load, decode, report."""
  _flags.settle(_OWN)
  _flags.single("batch")
  if not (FLAGS.prompt_file and FLAGS.output):
    raise ValueError("give --prompt_file and --output")
  for name in ("limit", "max_prompt_tokens"):
    if getattr(FLAGS, name) < 0:
      raise ValueError(f"--{name}={getattr(FLAGS, name)}; it must be >= 0")
  folder = Path(FLAGS.output)
  header = _decoding.header(_OWN)
  for file in FLAGS.prompt_file:
    prompts.scan(file)  # is there any, before models are loaded?
  models = _decoding.load(evaluation.buffer_size() + FLAGS.max_new_tokens)
  encoded, wanted, broken = read_prompts(models.target)
  groups = [group_of(prompt) for prompt in wanted]
  chosen, too_long = choose(encoded, groups)
  encoded, groups = ([x[i] for i in chosen] for x in (encoded, groups))
  _decoding.check_memory(
    [model.config for model in models if model],
    evaluation.buffer_size(max(map(len, encoded))) + FLAGS.max_new_tokens,
  )
  claim(folder, header, models, encoded)
  lines = run_folder.Lines(folder / "lines.jsonl")
  for line in lines.broken:
    print(f"skipped: {line}; its prompts are decoded again", file=sys.stderr)
  measured = decode(models, encoded, groups, lines)
  lines.close()
  runs = evaluation.sum_up(
    measured, groups, _flags.single("batch"), _decoding.comparable()
  )
  loads = [line["load"] for line in measured if line["load"] is not None]
  document = header | {
    "runs": [run.document() for run in runs],
    "measured": {
      "first": min(line["date"] for line in measured),
      "last": max(line["date"] for line in measured),
      "highest_load": max(loads, default=None),
    },
    "broken_lines": broken,
    "too_long": too_long,
  }
  text = report.by_group(runs)
  if too_long:
    text += (
      f"\n  {too_long} prompts of more than {FLAGS.max_prompt_tokens} tokens "
      "were left out"
    )
  if broken:
    text += f"\n  {len(broken)} broken lines were skipped"
  for caveat in document["caveats"]:
    text += f"\n  beware: {caveat}"
  print(text)
  (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
  report.write_json(str(folder / "results.json"), document)
  if FLAGS.json:
    report.write_json(FLAGS.json, document)
  plots.by_group(
    document["runs"],
    folder / "plot.png",
    f"{FLAGS.target}, {_decoding.describe_drafter()}, {FLAGS.acceptance}, "
    f"temperature {FLAGS.temperature:g}"
    + (f", k = {FLAGS.k[0]}" if len(FLAGS.k) == 1 else ""),
    document["caveats"],
  )
  print(f"results: {folder}/results.json, table.txt, plot.png", file=sys.stderr)


main = _main.main_of(
  "eval", evaluate, interrupted="stopped; the same command goes on from here"
)

if __name__ == "__main__":
  _main.start(main)
