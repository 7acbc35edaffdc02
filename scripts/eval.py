"""Decodes files of prompts and reports by category: tokens per pass, speedup.

  python scripts/eval.py --prompt_file=spec_bench.jsonl --output=runs/eval
  python scripts/eval.py --prompt_file=A.jsonl --prompt_file=B.jsonl --chat \\
    --target=smollm2-135m-instruct --k=1-8 --limit=4 --output=runs/lookup
  python scripts/eval.py --prompt_file=A.jsonl --exit_layer=3 --k=1,2,4 \\
    --output=runs/early_exit

Lines of a JSONL file are Spec-Bench's (question_id, category, turns, of which
the first is used) or plain ones (prompt, text or token_ids, and a category; the
file's name stands in for one). Spec-Bench's eight MT-bench categories count as
one, as in its paper (arXiv:2401.07851). Every prompt is decoded plainly and
with each k, in one run. The output folder gets lines.jsonl as prompts finish,
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
import numpy as np
from absl import flags
from tqdm import tqdm

from specdec import display, prompts, report, run_folder
from specdec.analysis import metrics, plots
from specdec.types import Stats

_MT_BENCH = frozenset(
  (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
  )
)
_SMALLEST = 256  # tokens of the smallest prompt buffer; others double it
# What does not change the results: where they are kept, how they are written.
_FREE = ("output", "json", "compilation_cache", "config")

_BEFORE = set(flags.FLAGS)
flags.DEFINE_string("output", None, "Folder of the results.")
flags.DEFINE_integer("limit", 0, "Prompts of a category, 0 for all of them.")
flags.DEFINE_integer(
  "max_prompt_tokens", 0, "Leave out longer prompts, 0 for none of them."
)
FLAGS = flags.FLAGS
_OWN = sorted(set(FLAGS) - _BEFORE)
FLAG_NAMES = [*_flags.SHARED, *_OWN]


def group_of(prompt: prompts.Prompt) -> str:
  """The category that a prompt is counted under."""
  if prompt.category == "all":  # taken: the sum of all groups
    return "all (category)"
  return "mt_bench" if prompt.category in _MT_BENCH else prompt.category


def read_prompts() -> tuple[list[prompts.Prompt], list[str]]:
  """All prompts, and a sentence for each line that holds none."""
  found, broken = [], []
  for file in FLAGS.prompt_file:
    good, bad = prompts.scan(file)
    found += good
    broken += bad
  for line in broken:
    print(f"skipped: {line}", file=sys.stderr)
  return found, broken


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


def buffer_size(length: int) -> int:
  """The smallest of few buffers that holds a prompt."""
  size = _SMALLEST
  while size < length:
    size *= 2
  return size


def plan(encoded, groups, batch: int) -> list[tuple[int, list[int]]]:
  """(prompt buffer, indices of its prompts) of every batch.

  A batch is of one group and one buffer, so that its time belongs to the group
  and few shapes are compiled.
  """
  kinds = {}
  for i, (ids, group) in enumerate(zip(encoded, groups)):
    kinds.setdefault((buffer_size(len(ids)), group), []).append(i)
  return [
    (size, members[first : first + batch])
    for (size, _), members in sorted(kinds.items())
    for first in range(0, len(members), batch)
  ]


def decode_batch(sessions, members, encoded, missing) -> list[dict]:
  """A line for every k that is missing for these prompts."""
  rows = [encoded[i] for i in members]
  lines, plain = [], None
  for place, k in enumerate(missing):
    session = sessions[k]
    ours = session.complete(rows, members, plain=False)
    if place == 0:  # once a batch, for all k
      plain = session.complete(rows, members, plain=True)
    differences = []
    if _decoding.comparable():
      differences = [
        session.first_difference(encoded[i], a, b, i)
        for i, a, b in zip(members, ours.texts, plain.texts)
        if a != b
      ]
    lines.append(
      {
        "prompts": members,
        "k": k,
        "seconds": ours.seconds,
        "plain_seconds": plain.seconds,
        "tokens": [len(text) for text in ours.texts],
        "plain_tokens": [len(text) for text in plain.texts],
        "stats": {
          name: np.asarray(value).tolist()
          for name, value in vars(ours.stats).items()
        },
        "differences": differences,
      }
    )
  return lines


def summed_up(lines: list[dict], group: str, k: int) -> report.Run:
  """One row of the table."""
  stats = [
    Stats(**{name: np.array(x) for name, x in line["stats"].items()})
    for line in lines
  ]
  texts = sum(len(line["prompts"]) for line in lines)
  differences = tuple(d for line in lines for d in line["differences"])
  return report.Run(
    group,
    k,
    _flags.single("batch"),
    metrics.acceptance(stats),
    metrics.speed(
      *(
        [np.sum(line[name]) for line in lines]
        for name in ("tokens", "seconds", "plain_tokens", "plain_seconds")
      )
    ),
    report.Identity(texts, texts - len(differences), differences)
    if _decoding.comparable()
    else None,
  )


def runs_of(lines: list[dict], groups: list[str]) -> list[report.Run]:
  """Every group in the order of the files, then all, for every k."""
  runs = []
  for group in [*dict.fromkeys(groups), "all"]:
    for k in FLAGS.k:
      own = [
        line
        for line in lines
        if line["k"] == k and group in ("all", groups[line["prompts"][0]])
      ]
      runs.append(summed_up(own, group, k))
  return runs


def table(runs: list[report.Run]) -> str:
  """The table of the results."""
  header = ["group", "texts", "k", "tokens/pass", "accepted/drafted"]
  header += ["plain tok/s", "tok/s", "speedup", "same text"]
  return display.columns(
    header,
    [
      [
        run.group,
        str(run.acceptance.texts),
        str(run.k),
        str(run.acceptance.tokens_per_pass),
        str(run.acceptance.accepted_per_drafted),
        f"{run.speed.plain_tokens_per_second:.1f}",
        f"{run.speed.tokens_per_second:.1f}",
        str(run.speed.speedup),
        f"{run.identity.same}/{run.identity.texts}" if run.identity else "-",
      ]
      for run in runs
    ],
  )


def decode(models, encoded, groups, lines) -> None:
  """Decodes whatever `lines` does not hold yet."""
  batch = _flags.single("batch")
  done = {(i, line["k"]) for line in lines.entries for i in line["prompts"]}
  sessions, size_of_sessions = {}, None
  todo = [
    (size, members, [k for k in FLAGS.k if (members[0], k) not in done])
    for size, members in plan(encoded, groups, batch)
  ]
  with tqdm(total=len(encoded) * len(FLAGS.k), unit="text") as progress:
    progress.update(len(done))
    for size, members, missing in todo:
      if not missing:
        continue
      if size != size_of_sessions:
        progress.set_postfix_str(f"compiling for prompts up to {size} tokens")
        sessions, size_of_sessions = {}, size
        for k in FLAGS.k:
          sessions[k] = _decoding.make_session(
            models, k, batch, size, models.target.eos_ids
          )
          sessions[k].warm_up()
      progress.set_postfix_str(groups[members[0]])
      for line in decode_batch(sessions, members, encoded, missing):
        lines.append(line)
        progress.update(len(members))


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
  wanted, broken = read_prompts()
  header = _decoding.header(_OWN)
  checksum = zlib.crc32(repr(wanted).encode())
  run_folder.claim(folder, header["settings"] | {"prompts": checksum}, _FREE)
  models = _decoding.load(_SMALLEST + FLAGS.max_new_tokens)
  encoded = prompts.encode(
    wanted,
    models.target.tokenizer,
    FLAGS.chat,
    models.target.config.vocab_size,
  )
  groups = [group_of(prompt) for prompt in wanted]
  chosen, too_long = choose(encoded, groups)
  encoded, groups = ([x[i] for i in chosen] for x in (encoded, groups))
  _decoding.check_memory(
    [model.config for model in models if model],
    buffer_size(max(map(len, encoded))) + FLAGS.max_new_tokens,
  )
  lines = run_folder.Lines(folder / "lines.jsonl")
  for line in lines.broken:
    print(f"skipped: {line}; its prompts are decoded again", file=sys.stderr)
  decode(models, encoded, groups, lines)
  lines.close()
  runs = runs_of(lines.entries, groups)
  document = header | {
    "runs": [run.document() for run in runs],
    "broken_lines": broken,
    "too_long": too_long,
  }
  text = table(runs)
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
