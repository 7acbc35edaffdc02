"""Sets acceptance rules and draft shapes side by side, at equal target tokens.

  python scripts/compare_rules.py --prompt_file=P.jsonl --temperature=1 \\
    --output=runs/rules
  python scripts/compare_rules.py --prompt_file=P.jsonl --temperature=1 \\
    --target=smollm2-135m-instruct --exit_layer=26 --chat --limit=8 --sizes=8 \\
    --only=rejection,block --output=runs/exit

Each draft has as many draft tokens as --sizes says: in one chain, in 2 or 4
chains, in the static tree that suits the acceptance by rank measured here
first, and in EAGLE-2's dynamic tree. A line for each rule that is right for a
shape:

  expected  accepted tokens a round by the two distributions alone. All rules of
  a shape
            evaluate the very same drafts, of a text that rejection writes.
  measured  accepted tokens a round of that rule's own texts, with one standard
            error. A lossy rule writes other texts than the others.
  distribution       exact; or for a lossy rule the total variation between what
  it emits
            and the target's distribution, on small random tables (V = 4, two
            levels; at this temperature, without top-k and top-p).

Decoding is timed in turns with autoregressive decoding; no token ends a text.
The output folder gets lines.jsonl as points finish, then results.json
(docs/schema.json), table.txt, plot.png and tree.json: the static tree that pays
most by the times measured, for --shape of the other programs. The same command
goes on where it was killed.
"""

import json
import sys
from pathlib import Path

import _decoding
import _flags
import _main
import _prompt_files
import _rules
import numpy as np
from absl import flags
from tqdm import tqdm

from specdec.benchmark import (
  comparison,
  evaluation,
  provenance,
  results,
  timing,
)
from specdec.report import plots
from specdec.roofline import trees
from specdec.utils import files, terminal

# What is tried here one after the other, or measured, or drafts chains only.
_REFUSED = (
  "k", "acceptance", "shape", "siblings", "rates", "rank_acceptance",
  "copy_first",
)  # fmt: skip
# Any that fall: which shapes there are does not depend on them.
_SOME_RANKS = {
  kind: (0.5, 0.25, 0.1) for kind in ("without_replacement", "deterministic")
}

_BEFORE = set(flags.FLAGS) - set(_prompt_files.OWN)
_flags.define_integers("sizes", "4,8,16", "Draft tokens of a round.")
flags.DEFINE_list(
  "only", [], f"Rules, of {', '.join(comparison.RULES)}; default all."
)
flags.DEFINE_list(
  "shapes", [], f"Shapes, of {', '.join(comparison.SHAPES)}; default all."
)
FLAGS = flags.FLAGS
for _module in (_flags, _prompt_files):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = sorted(set(FLAGS) - _BEFORE)
FLAG_NAMES = [*_flags.SHARED, *_OWN]


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  for name in _REFUSED:
    if FLAGS[name].present or name in (FLAGS.config or {}):
      raise ValueError(
        f"--{name} is not for compare_rules, which tries and measures what it "
        "compares"
      )
  _prompt_files.check_flags()
  if FLAGS.drafter == "lookup":
    raise ValueError(
      "lookup drafts chains only; give --draft, --exit_layer, --skip or "
      "--learned"
    )
  for flag, known in (
    ("only", comparison.RULES),
    ("shapes", comparison.SHAPES),
  ):
    for name in FLAGS[flag].value:
      if name not in known:
        raise ValueError(f"--{flag}={name}; accepted: {', '.join(known)}")
  if min(FLAGS.sizes) < 1:
    raise ValueError(f"--sizes={min(FLAGS.sizes)}; it must be >= 1")
  if max(FLAGS.sizes) > FLAGS.max_new_tokens:
    raise ValueError(
      f"a chain of --sizes={max(FLAGS.sizes)} never fits into "
      f"--max_new_tokens={FLAGS.max_new_tokens}"
    )
  for name in comparison.RULES:
    _rules.RULES[name]()  # are its numbers right?
  if not any(shape.rules for shape in chosen_shapes(_SOME_RANKS)):
    raise ValueError("none of --only is right for any of --shapes at --sizes")


def measure_ranks(bench: comparison.RuleComparison, lines: files.Lines) -> dict:
  """By kind of siblings, how often the r-th of them is kept."""
  for line in lines.entries:
    if "ranks" in line:
      return line["ranks"]
  terminal.report("measuring acceptance by rank ...", file=sys.stderr)
  found = {kind: bench.ranks(kind) for kind in _SOME_RANKS}
  lines.append({"ranks": found})
  return found


def chosen_shapes(ranks: dict) -> list[comparison.Shape]:
  """The shapes and rules that were asked for."""
  rules = {
    name: _rules.RULES[name]() for name in FLAGS.only or comparison.RULES
  }
  return [
    shape
    for size in FLAGS.sizes
    for shape in comparison.shapes_of(size, ranks, rules)
    if shape.name in (FLAGS.shapes or comparison.SHAPES)
  ]


def check_depth(models) -> None:
  """Refuses shapes deeper than a learned drafter has heads."""
  most = models.learned and models.learned.head_config.most_levels
  for shape in chosen_shapes(_SOME_RANKS):
    if most and shape.levels > most:
      raise ValueError(
        f"the {shape.name} of --sizes={shape.size} has {shape.levels} levels; "
        f"{FLAGS.learned} has {most} heads, one a level: give smaller --sizes, "
        "or other --shapes"
      )


def compare(
  bench: comparison.RuleComparison, lines: files.Lines, known: dict
) -> list[dict]:
  """Every point; those that `lines` does not hold are measured."""
  done = {tuple(x["point"]): x["run"] for x in lines.entries if "point" in x}
  shapes = chosen_shapes(known)
  total = sum(len(shape.rules) for shape in shapes)
  with tqdm(total=total, unit="rule") as progress:
    for shape in shapes:
      points = {rule: (*shape[:3], rule) for rule in shape.rules}
      expected = None
      for rule, point in points.items():
        progress.set_postfix_str(f"{shape.size}: {shape.name}, {rule}")
        if point not in done:
          expected = expected or bench.expected(shape)
          measured, round_seconds = bench.measured(shape, rule)
          run = measured.document() | expected[rule]
          run["round_seconds"] = round_seconds
          run["comparison"] = {
            "rule": rule,
            "shape": shape.name,
            "siblings": shape.siblings,
            "lossless": bench.rules[rule].lossless,
            "distance": bench.loss(shape, rule, FLAGS.temperature),
          }
          lines.append({"point": point, "run": run, "load": provenance.load()})
          done[point] = run
        progress.update()
      timing.forget_programs()
  return [done[(*shape[:3], rule)] for shape in shapes for rule in shape.rules]


def best_tree(models, context: int, lines, ranks, runs) -> dict | None:
  """The static tree that pays most by times measured here; None if no chain
  was decoded, which says what a level of drafting takes."""
  chains = [run for run in runs if run["comparison"]["shape"] == "chain"]
  if not chains:
    return None
  chain, batch = chains[0], _flags.single("batch")
  passes = [tuple(line["pass"]) for line in lines.entries if "pass" in line]
  most = max(FLAGS.sizes) + 1
  for n in sorted({1, *(2**i for i in range(1, 20) if 2**i < most), most}):
    if n not in [done for done, _ in passes]:
      slots = context + FLAGS.max_new_tokens + n
      taken = timing.time_pass(
        models.target_model,
        models.target.params,
        batch,
        n,
        context,
        slots,
        repeats=5,
      )
      passes.append((n, taken.median))
      lines.append({"pass": passes[-1]})
  speed = chain["speed"]
  # What a plain round takes beside its pass (drawing, say) others take as well.
  baseline = speed["baseline_seconds"] * batch / speed["baseline_tokens"]
  overhead = max(0.0, baseline - dict(passes)[1])
  times = {n: seconds + overhead for n, seconds in passes}
  levels = chain["k"]
  of_pass = float(np.interp(chain["nodes"], *zip(*sorted(times.items()))))
  of_level = max(0.0, (chain["round_seconds"] - of_pass) / levels)
  # A distribution without noise has but one token to draw: its siblings are no
  # draft tokens.
  kind = "without_replacement" if FLAGS.temperature else "deterministic"
  found = trees.best(ranks[kind], times, of_level)
  return {
    "siblings": kind,
    "pass_seconds": sorted(times.items()),
    "level_seconds": of_level,
    "paths": found.paths,
    "tokens": found.tokens,
    "seconds": found.seconds,
  }


def describe(ranks: dict, chosen: dict) -> str:
  """The chosen tree, in two lines."""
  kind = chosen["siblings"].replace("_", " ")
  paths, baseline = chosen["paths"], chosen["pass_seconds"][0][1]
  best = f"{len(paths)} draft tokens in {len(paths[-1]) if paths else 0} levels"
  return (
    f"  kept by rank of a child, {kind}: "
    f"{' '.join(f'{x:.2f}' for x in ranks[chosen['siblings']])}\n"
    f"  best tree by the times of this run: {best if paths else 'none'}, "
    f"{chosen['tokens']:.2f} tokens expected in {1e3 * chosen['seconds']:.1f} "
    f"ms (autoregressive decoding: 1 in {1e3 * baseline:.1f} ms)"
  )


def work() -> None:
  """The whole run: check, load, compare, report."""
  _flags.settle(_OWN, any_rule=True)
  check_flags()
  header = _decoding.header(_OWN)
  models = _decoding.load(evaluation.buffer_size() + FLAGS.max_new_tokens)
  check_depth(models)
  encoded, found, _ = _prompt_files.read_prompts(models.target)
  groups = [_prompt_files.group_of(prompt) for prompt in found]
  chosen, _ = _prompt_files.choose(encoded, groups)
  encoded = [encoded[i] for i in chosen]
  batch = min(_flags.single("batch"), len(encoded))
  size = evaluation.buffer_size(max(map(len, encoded)))

  def make(shape: comparison.Shape, rule):
    drafter = _decoding.make_drafter(models, shape.levels, shape.expansion)
    return _decoding.decoder_of(models, drafter, rule, batch, size, ())

  rules = {name: _rules.RULES[name]() for name in comparison.RULES}
  bench = comparison.RuleComparison(encoded, batch, rules, make)
  _decoding.check_memory(
    models.configs,
    size + FLAGS.max_new_tokens,
    1 + max(FLAGS.sizes),
    models.places,
  )
  folder = Path(FLAGS.output)
  _prompt_files.claim(folder, header, models, encoded)
  lines = files.Lines(folder / "lines.jsonl")
  ranks = measure_ranks(bench, lines)
  runs = compare(bench, lines, ranks)
  context = max(map(len, encoded))
  chosen = best_tree(models, context, lines, ranks, runs)
  lossy = {rules[run["comparison"]["rule"]].caveat for run in runs}
  caveats = [*header["caveats"], *sorted(lossy - {""})]
  text = results.of_rules(runs)
  for caveat in caveats:
    text += f"\n  warning: {caveat}"
  if chosen:
    text += "\n" + describe(ranks, chosen)
    paths = json.dumps(chosen["paths"])
    files.replace_text(folder / "tree.json", paths + "\n")
  terminal.report(text)
  files.replace_text(folder / "table.txt", text + "\n")
  document = header | {
    "caveats": caveats,
    "runs": runs,
    "acceptance_by_rank": ranks,
    "tree": chosen,
  }
  results.write_json(str(folder / "results.json"), document)
  plots.over_sizes(
    runs,
    folder / "plot.png",
    f"{FLAGS.target}, {_decoding.describe_drafter()}, temperature "
    f"{FLAGS.temperature:g}",
    caveats,
  )
  terminal.report(
    f"results: {folder}/results.json, table.txt, plot.png", file=sys.stderr
  )


main = _main.main_of(
  "compare_rules",
  work,
  interrupted="stopped; the same command goes on from here",
)

if __name__ == "__main__":
  _main.start(main)
