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
import numpy as np
from absl import flags
from tqdm import tqdm

from specdec import display, prompts, provenance, report, run_folder
from specdec.analysis import metrics, plots
from specdec.training import saving
from specdec.types import Stats

_SMALLEST = 256  # tokens of the smallest prompt buffer; others double it
# What does not change the results: where they are kept, how they are written.
_FREE = ("output", "json", "compilation_cache")

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


def decode_batch(sessions, members, encoded, turn: int) -> dict:
  """The line of one batch: plain decoding once, and every k.

  Args:
    turn: says when it is plain decoding's turn, so that it is not always the
      first or the last.
  """
  rows = [encoded[i] for i in members]
  ways = list(sessions)
  ways.insert(turn % (len(ways) + 1), None)
  any_session = next(iter(sessions.values()))
  done = {
    k: sessions.get(k, any_session).complete(rows, members, plain=k is None)
    for k in ways
  }
  plain = done[None]

  def counted(k: int) -> dict:
    ours = done[k]
    differences = []
    if _decoding.comparable():
      differences = [
        sessions[k].first_difference(encoded[i], a, b, i)
        for i, a, b in zip(members, ours.texts, plain.texts)
        if a != b
      ]
    return {
      "k": k,
      "tokens": sum(map(len, ours.texts)),
      "seconds": ours.seconds,
      "prefill_seconds": ours.prefill_seconds,
      "stats": {
        name: np.asarray(value).tolist()
        for name, value in vars(ours.stats).items()
      },
      "differences": differences,
    }

  return {
    "prompts": members,
    "plain_tokens": sum(map(len, plain.texts)),
    "plain_seconds": plain.seconds,
    "plain_prefill_seconds": plain.prefill_seconds,
    "runs": [counted(k) for k in sessions],
  }


def summed_up(lines: list[dict], group: str, place: int) -> report.Run:
  """One row of the table: these lines' runs number `place`."""
  runs = [line["runs"][place] for line in lines]
  stats = [
    Stats(**{name: np.array(x) for name, x in run["stats"].items()})
    for run in runs
  ]
  texts = sum(len(line["prompts"]) for line in lines)
  differences = tuple(d for run in runs for d in run["differences"])
  return report.Run(
    group,
    FLAGS.k[place],
    _flags.single("batch"),
    metrics.acceptance(stats),
    metrics.speed(
      [run["tokens"] for run in runs],
      [run["seconds"] for run in runs],
      [line["plain_tokens"] for line in lines],
      [line["plain_seconds"] for line in lines],
      [run["prefill_seconds"] for run in runs],
      [line["plain_prefill_seconds"] for line in lines],
    ),
    report.Identity(texts, texts - len(differences), differences)
    if _decoding.comparable()
    else None,
  )


def runs_of(lines: list[dict], groups: list[str]) -> list[report.Run]:
  """Every group in the order of the files, then all, for every k."""
  return [
    summed_up(
      [x for x in lines if group in ("all", groups[x["prompts"][0]])],
      group,
      place,
    )
    for group in [*dict.fromkeys(groups), "all"]
    for place in range(len(FLAGS.k))
  ]


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


def decode(models, encoded, groups, lines) -> list[dict]:
  """Decodes whatever `lines` does not hold yet; a line for every batch."""
  batch = _flags.single("batch")
  batches = plan(encoded, groups, batch)
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
        line = decode_batch(sessions, members, encoded, turn)
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
  models = _decoding.load(_SMALLEST + FLAGS.max_new_tokens)
  encoded, wanted, broken = read_prompts(models.target)
  groups = [group_of(prompt) for prompt in wanted]
  chosen, too_long = choose(encoded, groups)
  encoded, groups = ([x[i] for i in chosen] for x in (encoded, groups))
  _decoding.check_memory(
    [model.config for model in models if model],
    buffer_size(max(map(len, encoded))) + FLAGS.max_new_tokens,
  )
  claim(folder, header, models, encoded)
  lines = run_folder.Lines(folder / "lines.jsonl")
  for line in lines.broken:
    print(f"skipped: {line}; its prompts are decoded again", file=sys.stderr)
  measured = decode(models, encoded, groups, lines)
  lines.close()
  runs = runs_of(measured, groups)
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
