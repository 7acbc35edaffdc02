"""Decodes files of prompts and reports by category: tokens per pass, speedup.

  python scripts/eval.py --prompt_file=spec_bench.jsonl --output=runs/eval
  python scripts/eval.py --prompt_file=A.jsonl --prompt_file=B.jsonl --chat \\
    --target=smollm2-135m-instruct --k=1-8 --limit=4 --output=runs/lookup
  python scripts/eval.py --prompt_file=A.jsonl --exit_layer=3 --k=1,2,4 \\
    --output=runs/early_exit

Lines of a JSONL file are Spec-Bench's (question_id, category, turns, of which
the first is used) or plain ones (prompt, text or token_ids, and a category; the
file's name stands in for one). Spec-Bench's eight MT-bench categories count as
one, as in its paper (arXiv:2401.07851). Every prompt is decoded
autoregressively, once, and with each k. The output folder gets lines.jsonl as
prompts finish, then results.json (docs/schema.json), table.txt and plot.png.
The same command again goes on where it was stopped or killed.
"""

import sys
from pathlib import Path

import _decoding
import _flags
import _main
import _prompt_files
from absl import flags
from tqdm import tqdm

from specdec.benchmark import evaluation, provenance, results
from specdec.benchmark.decoder import Batch
from specdec.report import plots
from specdec.utils import files, terminal

FLAGS = flags.FLAGS
for _module in (_flags, _prompt_files):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = _prompt_files.OWN
FLAG_NAMES = [*_flags.SHARED, *_OWN]


def decode(models, encoded, groups, lines) -> list[dict]:
  """Decodes whatever `lines` does not hold yet; a line for every batch."""
  batch = _flags.single("batch")
  batches = evaluation.plan(encoded, groups, batch)
  done = {tuple(line["prompts"]): line for line in lines.entries}
  decoders, baseline, compiled_size = {}, None, None
  with tqdm(total=len(encoded) * len(FLAGS.k), unit="text") as progress:
    for turn, (size, members) in enumerate(batches):
      if tuple(members) not in done:
        if size != compiled_size:
          decoders, baseline, compiled_size = {}, None, size
          for k in FLAGS.k:
            what = f"compiling k = {k} for prompts up to {size} tokens"
            with terminal.progress(what):
              decoders[k] = _decoding.make_decoder(
                models, k, batch, size, models.target.eos_ids
              )
              baseline = baseline or decoders[k].baseline()
              for decoder in (decoders[k], baseline):
                if not decoder.is_warm:
                  decoder.warm_up([encoded[i] for i in members])
        progress.set_postfix_str(terminal.escape(groups[members[0]], ""))
        line = evaluation.decode_batch(
          decoders,
          baseline,
          Batch([encoded[i] for i in members], members),
          turn,
          _decoding.comparable(),
        )
        line |= {"date": provenance.now(), "load": provenance.load()}
        lines.append(line)
        done[tuple(members)] = line
      progress.update(len(members) * len(FLAGS.k))
  return [done[tuple(members)] for _, members in batches]


def evaluate() -> None:
  """The whole run: check, load, decode, report."""
  _flags.settle(_OWN)
  _flags.single("batch")
  _prompt_files.check_flags()
  folder = Path(FLAGS.output)
  header = _decoding.header(_OWN)
  models = _decoding.load(evaluation.buffer_size() + FLAGS.max_new_tokens)
  encoded, wanted, broken = _prompt_files.read_prompts(models.target)
  groups = [_prompt_files.group_of(prompt) for prompt in wanted]
  chosen, too_long = _prompt_files.choose(encoded, groups)
  encoded, groups = ([x[i] for i in chosen] for x in (encoded, groups))
  _decoding.check_memory(
    models.configs,
    evaluation.buffer_size(max(map(len, encoded))) + FLAGS.max_new_tokens,
    places=models.places,
  )
  _prompt_files.claim(folder, header, models, encoded)
  lines = files.Lines(folder / "lines.jsonl")
  for line in lines.broken:
    terminal.report(
      f"skipped: {line}; its prompts are decoded again", file=sys.stderr
    )
  measured = decode(models, encoded, groups, lines)
  runs = evaluation.sum_up(
    measured, groups, _flags.single("batch"), _decoding.comparable()
  )
  loads = [line["load"] for line in measured if line["load"] is not None]
  faults = [fault for line in measured for fault in line.get("faults", ())]
  document = header | {
    "caveats": [*header["caveats"], *faults],
    "runs": [run.document() for run in runs],
    "measured": {
      "first": min(line["date"] for line in measured),
      "last": max(line["date"] for line in measured),
      "highest_load": max(loads, default=None),
    },
    "broken_lines": broken,
    "too_long": too_long,
  }
  text = results.by_group(runs)
  if too_long:
    text += (
      f"\n  {too_long} prompts of more than {FLAGS.max_prompt_tokens} tokens "
      "were left out"
    )
  if broken:
    text += f"\n  {len(broken)} broken lines were skipped"
  for caveat in document["caveats"]:
    text += f"\n  warning: {caveat}"
  terminal.report(text)
  files.replace_text(folder / "table.txt", text + "\n")
  results.write_json(str(folder / "results.json"), document)
  if FLAGS.json:
    results.write_json(FLAGS.json, document)
  plots.by_group(
    document["runs"],
    folder / "plot.png",
    f"{FLAGS.target}, {_decoding.describe_drafter()}, {FLAGS.acceptance}, "
    f"temperature {FLAGS.temperature:g}"
    + (f", k = {FLAGS.k[0]}" if len(FLAGS.k) == 1 else ""),
    document["caveats"],
  )
  terminal.report(
    f"results: {folder}/results.json, table.txt, plot.png", file=sys.stderr
  )


main = _main.main_of(
  "eval", evaluate, interrupted="stopped; the same command goes on from here"
)

if __name__ == "__main__":
  _main.start(main)
