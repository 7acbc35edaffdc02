"""Sets drafters of one target side by side: what each is worth, and why.

  python scripts/compare_drafters.py --prompt_file=corpus/prompts.jsonl \\
    --output=runs/drafters
  python scripts/compare_drafters.py --prompt_file=corpus/prompts.jsonl \\
    --drafters=model:stdlib-1m,runs/prophet/best.safetensors \\
    --output=runs/drafters

Every drafter decodes the same prompts with the same rule (--acceptance,
rejection if not given), greedily and at temperature 1, in chains of every --k
and in one tree of --tree_size draft tokens that is the same for all, each in
turns with autoregressive decoding; no token ends a text. A line for each:

  weights        of its own
  MB a draft token     that a draft token but the first of a round reads
  at position    how often the first, second ... draft token of a round is kept,
  given
                 that those before it were; measured with the longest chain
  tokens a pass  with each k measured, and in the tree
  speedup        over autoregressive decoding: measured / predicted by bytes
    alone: a
                 draft token takes what it reads at the rate at which a
                 one-token pass of the target was seen to read, a verification
                 what a pass of so many tokens was seen to take; drafters with
                 KV of the text read their layers once more a round. What is
                 missing is what small operations cost beside their bytes
  best           the fastest chain, with one standard error, its tokens per
                 second, and autoregressive decoding's beside it

The output folder gets lines.jsonl as points finish, then results.json,
table.txt and plot.png. The same command goes on where it was killed.
"""

import dataclasses
import sys
from pathlib import Path

import _decoding
import _entrants
import _flags
import _main
import _prompt_files
import numpy as np
from absl import flags
from tqdm import tqdm

from specdec import draft_shape, draft_tree
from specdec.benchmark import (
  comparison,
  evaluation,
  provenance,
  results,
  timing,
)
from specdec.checkpoints import shipped
from specdec.models import transformer
from specdec.report import drafter_plots
from specdec.roofline.cost import pass_bound
from specdec.utils import files, terminal
from specdec.utils.terminal import columns

_REFUSED = (
  "temperature", "drafter", "draft", "exit_layer", "learned", "skip",
  "skip_attention", "skip_mlp", "exit_threshold", "shape", "siblings", "mesh",
  "draft_ways", "random_weights",
)  # fmt: skip
TEMPERATURES = (0.0, 1.0)
_BEFORE = set(flags.FLAGS) - set(_prompt_files.OWN)
flags.DEFINE_list("drafters", [], f"Who competes: {_entrants.HELP}.")
flags.DEFINE_integer("tree_size", 8, "Draft tokens of the tree, 0 for none.")
FLAGS = flags.FLAGS
for _module in (_flags, _prompt_files):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = sorted(set(FLAGS) - _BEFORE)
FLAG_NAMES = [*_flags.SHARED, *_OWN]
# How often a node's first, second ... child is kept: shapes the tree.
_RANKS = (0.6, 0.14, 0.07)
_K = (1, 2, 3, 4, 5, 6, 7, 8)
_DEEPEST = 8  # levels of the tree


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  for name in _REFUSED:
    if FLAGS[name].present or name in (FLAGS.config or {}):
      raise ValueError(f"--{name} is not for compare_drafters: see --help")
  _prompt_files.check_flags()
  if FLAGS.tree_size < 0 or min(FLAGS.k) < 1:
    raise ValueError("--tree_size must be >= 0 and every --k >= 1")


def points(
  candidate: _entrants.Candidate, temperature: float, depth: int
) -> list[comparison.Shape]:
  """The drafts that it is measured with; no k that it has no heads for.

  Args:
    depth: levels of the tree at most, the same for all drafters.
  """
  most = candidate.most_levels or max(FLAGS.k)
  rules = (FLAGS.acceptance,)
  found = [
    comparison.Shape(k, "chain", "none", k, None, rules)
    for k in FLAGS.k
    if k <= most
  ]
  if FLAGS.tree_size and not candidate.chains_only:
    ranks = FLAGS.rank_acceptance or _RANKS
    by_depth = np.tile(np.array(ranks, float), (depth, 1))
    paths = draft_tree.optimal(by_depth, FLAGS.tree_size)
    # A greedy distribution has but one token to draw: its siblings would be no
    # draft tokens.
    kind = "without_replacement" if temperature else "deterministic"
    made = draft_shape.static(draft_tree.from_paths(paths), kind)
    levels = made.spec.max_depth
    found.append(
      comparison.Shape(FLAGS.tree_size, "tree", kind, levels, made, rules)
    )
  return found


def check_candidates(candidates: list[_entrants.Candidate]) -> None:
  """Refuses ks for which one of them has no heads at all."""
  for candidate in candidates:
    if candidate.most_levels is not None and candidate.most_levels < min(
      FLAGS.k
    ):
      raise ValueError(
        f"{candidate.name} has {candidate.most_levels} heads, one a draft "
        "token; give a "
        "--k as small as that"
      )


def measure_all(candidates, lines, bench_of) -> list[dict]:
  """Every point; those that `lines` does not hold are measured."""
  done = {tuple(x["point"]): x for x in lines.entries if "point" in x}
  depth = min([max(FLAGS.k), *(e.most_levels or _DEEPEST for e in candidates)])
  wanted = [
    (candidate, temperature, shape)
    for temperature in TEMPERATURES
    for candidate in candidates
    for shape in points(candidate, temperature, depth)
  ]
  for candidate, temperature, shape in tqdm(wanted, unit="point"):
    point = point_of(candidate, temperature, shape)
    if point in done:
      continue
    bench = bench_of(candidate, temperature)
    run, seconds = bench.measured(shape, FLAGS.acceptance)
    entry = {
      "point": point,
      "levels": shape.levels,
      "run": run.document(),
      "round_seconds": seconds,
      "load": provenance.load(),
    }
    lines.append(entry)
    done[point] = entry
    timing.forget_programs()
  return [done[point_of(*one)] for one in wanted]


def point_of(candidate, temperature: float, shape: comparison.Shape) -> tuple:
  """What a line is known by: a drafter trained anew is another one."""
  return (
    candidate.name, temperature, shape.name, shape.size, candidate.checksum
  )  # fmt: skip


def time_passes(target, lines, nodes, context: int) -> dict[int, float]:
  """Seconds of a pass of so many tokens, by their number."""
  batch = _flags.single("batch")
  passes = dict(tuple(x["pass"]) for x in lines.entries if "pass" in x)
  model = transformer.model(target.config)
  for n in sorted({1, *nodes} - set(passes)):
    slots = context + FLAGS.max_new_tokens + n
    taken = timing.time_pass(
      model, target.params, batch, n, context, slots, repeats=7
    )
    passes[n] = taken.median
    lines.append({"pass": (n, taken.median)})
  return passes


def predict(candidate, entry, passes, read_rate: float) -> float:
  """Speedup by bytes, for the tokens a pass that were measured."""
  run, speed = entry["run"], entry["run"]["speed"]
  batch = _flags.single("batch")
  baseline = speed["baseline_seconds"] * batch / speed["baseline_tokens"]
  overhead = max(0.0, baseline - passes[1])
  read = entry["levels"] * candidate.step_bytes + candidate.update_bytes
  round_seconds = passes[run["nodes"]] + overhead + read / read_rate
  tokens = run["acceptance"]["tokens_per_pass"]["value"]
  return tokens * baseline / round_seconds


def documents(candidates, entries, passes, read_rate) -> list[dict]:
  """Every point as results.json has it."""
  by_name = {candidate.name: candidate for candidate in candidates}
  found = []
  for entry in entries:
    name, temperature, shape, *_ = entry["point"]
    candidate = by_name[name]
    found.append(
      entry["run"]
      | {
        "drafter": {
          "name": name,
          "kind": candidate.kind,
          "temperature": temperature,
          "weights": candidate.weights,
          "step_bytes": candidate.step_bytes,
          "shape": shape,
          "seconds": entry["round_seconds"],
          "load": entry["load"],
        },
        "predicted": predict(candidate, entry, passes, read_rate),
      }
    )
  return found


def table(runs: list[dict]) -> str:
  """One line a drafter, a part for each temperature."""
  text = []
  for temperature in TEMPERATURES:
    own = [r for r in runs if r["drafter"]["temperature"] == temperature]
    names = dict.fromkeys(r["drafter"]["name"] for r in own)
    groups = [[r for r in own if r["drafter"]["name"] == n] for n in names]
    shapes = [*(f"k={k}" for k in FLAGS.k), "tree"]
    distribution = (
      "greedy" if temperature == 0 else f"temperature {temperature:g}"
    )
    header = [
      "drafter",
      "weights",
      "MB a draft token",
      "at position 1 2 3 4",
      *shapes,
    ]
    lines = [[*about(g), *by_shape(g, tokens_of)] for g in groups]
    text.append(f"{distribution}; tokens a pass\n\n{columns(header, lines)}")
    header = ["drafter", *shapes, "best", "tokens/s", "baseline"]
    lines = [[name_of(g), *by_shape(g, speed_of), *best_of(g)] for g in groups]
    text.append(
      f"{distribution}; speedup, measured / by "
      f"bytes\n\n{columns(header, lines)}"
    )
  return "\n\n".join(text)


def chains_of(runs: list[dict]) -> list[dict]:
  return [r for r in runs if r["drafter"]["shape"] == "chain"]


def name_of(runs: list[dict]) -> str:
  return runs[0]["drafter"]["name"]


def about(runs: list[dict]) -> list[str]:
  """A drafter at one temperature, but for its tokens a pass."""
  longest = max(chains_of(runs), key=lambda r: r["k"])
  kept = longest["acceptance"]["conditional"][:4]
  drafter = longest["drafter"]
  return [
    drafter["name"],
    f"{drafter['weights'] / 1e6:.2f} M" if drafter["weights"] else "-",
    f"{drafter['step_bytes'] / 1e6:.2f}" if drafter["step_bytes"] else "-",
    " ".join("-" if x["value"] is None else f"{x['value']:.2f}" for x in kept),
  ]


def by_shape(runs: list[dict], say) -> list[str]:
  """`say` of the chain of every k, then of the tree; empty: not measured."""
  trees = [r for r in runs if r["drafter"]["shape"] == "tree"]
  found = {r["k"]: say(r) for r in chains_of(runs)}
  said = [found.get(k, "") for k in FLAGS.k]
  return [*said, say(trees[0]) if trees else ""]


def tokens_of(run: dict) -> str:
  return f"{run['acceptance']['tokens_per_pass']['value']:.2f}"


def speed_of(run: dict) -> str:
  return f"{run['speed']['speedup']['value']:.2f} / {run['predicted']:.2f}"


def best_of(runs: list[dict]) -> list[str]:
  """The fastest chain: its speedup, and tokens per second of both."""
  best = max(chains_of(runs), key=lambda r: r["speed"]["speedup"]["value"])
  speed = best["speed"]
  found = speed["speedup"]
  error = f" ± {found['error']:.2f}" if found["error"] is not None else ""
  return [
    f"k={best['k']}: {found['value']:.2f}{error}",
    f"{speed['tokens_per_second']:.0f}",
    f"{speed['baseline_tokens_per_second']:.0f}",
  ]


def work() -> None:
  """The whole run: check, load, measure, report."""
  given = FLAGS["acceptance"].present
  if not given:
    FLAGS.acceptance = "rejection"
  if not FLAGS["k"].present:
    FLAGS.k = _K
  _flags.settle(_OWN)
  FLAGS.draft, FLAGS.drafter = None, None
  check_flags()
  if not FLAGS.drafters:
    if FLAGS.target != shipped.TARGET:
      raise ValueError(f"--target={FLAGS.target}: name its --drafters")
    FLAGS.drafters = [
      "lookup", "model:stdlib-1m", "early_exit:1", "skip", *shipped.drafters()
    ]  # fmt: skip
  header = _decoding.header(_OWN)
  models = _decoding.load_target(
    evaluation.buffer_size() + FLAGS.max_new_tokens
  )
  target, candidates = _entrants.load(FLAGS.drafters, models.target)
  models = models._replace(target=target)
  check_candidates(candidates)
  encoded, prompts, _ = _prompt_files.read_prompts(target)
  groups = [_prompt_files.group_of(prompt) for prompt in prompts]
  chosen, _ = _prompt_files.choose(encoded, groups)
  encoded = [encoded[i] for i in chosen]
  batch = min(_flags.single("batch"), len(encoded))
  size = evaluation.buffer_size(max(map(len, encoded)))
  rule = _decoding.rule()

  def bench_of(candidate, temperature) -> comparison.RuleComparison:
    def make(shape, rule):
      drafter = candidate.make(shape.expansion, shape.levels)
      made = _decoding.decoder_of(models, drafter, rule, batch, size, ())
      return dataclasses.replace(
        made, params=candidate.params, temperature=temperature
      )

    return comparison.RuleComparison(
      encoded, batch, {FLAGS.acceptance: rule}, make
    )

  folder = Path(FLAGS.output)
  settings = header["settings"]
  kept = {n: x for n, x in settings.items() if n != "drafters"}
  _prompt_files.claim(folder, header | {"settings": kept}, models, encoded)
  lines = files.Lines(folder / "lines.jsonl")
  entries = measure_all(candidates, lines, bench_of)
  context = int(np.mean([len(ids) for ids in encoded]))
  nodes = {e["run"]["nodes"] for e in entries}
  passes = time_passes(target, lines, nodes, context)
  read_rate = pass_bound(target.config, batch, 1, context).bytes / passes[1]
  runs = documents(candidates, entries, passes, read_rate)
  text = table(runs)
  text += f"\n\n  a one-token pass reads {read_rate / 1e9:.1f} GB/s"
  for caveat in header["caveats"]:
    text += f"\n  warning: {caveat}"
  terminal.report(text)
  files.replace_text(folder / "table.txt", text + "\n")
  document = header | {
    "runs": runs,
    "pass_seconds": sorted(passes.items()),
    "read_rate": read_rate,
  }
  results.write_json(str(folder / "results.json"), document)
  drafter_plots.over_k(
    runs, folder / "plot.png", f"Drafters of {FLAGS.target}", header["caveats"]
  )
  terminal.report(
    f"results: {folder}/results.json, table.txt, plot.png", file=sys.stderr
  )


main = _main.main_of(
  "compare_drafters",
  work,
  interrupted="stopped; the same command goes on from here",
)

if __name__ == "__main__":
  _main.start(main)
