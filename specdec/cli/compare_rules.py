"""Compares acceptance rules and draft shapes at equal numbers of target tokens.

  python scripts/compare_rules.py --prompt_file=P.jsonl --temperature=1 \\
    --output=runs/two --sizes=8 --only='block; typical(epsilon=0.1)'
  python scripts/compare_rules.py --tables --output=runs/lossy

A draft of --sizes tokens is one chain, 2 or 4 chains, the static tree that
suits the acceptance by depth and rank, which is measured first, or EAGLE-2's
dynamic tree, as deep ('wide tree': as deep and wide as its size allows, a
block's DDTree). The table has a line for each rule that is right for a shape:

  expected       accepted tokens per round by the two distributions alone, of
                 the same drafts, in text that rejection writes.
  measured       accepted tokens per round of that rule's own texts, with one
                 standard error.
  distribution   total variation from the target's, on small random tables
  of optimum     accepted tokens on those tables over the most that any lossless
                 rule could accept there, by a linear program.

Decoding is timed in turns with the baseline; no token ends a text. The output
folder gets lines.jsonl as points finish, then results.json, table.txt, plot.png
and tree.json: the static tree that pays most by the times measured, for
--shape='paths(tree.json)'. The same command resumes a run that was killed.
--tables shows what lossy rules do at equal accepted length.
"""

import dataclasses
import json

from specdec.benchmark import comparison, evaluation, provenance, results
from specdec.benchmark.comparison import RULES, SHAPES, USUAL_SHAPES
from specdec.benchmark.setup import Setup
from specdec.cli import app, prompt_flags, setup_flags
from specdec.report import lossy_table, plots, tables
from specdec.testing import tabular
from specdec.utils import calls, files, run_folder, terminal
from specdec.utils.spelling import choices

_SOME_RANKS = dict.fromkeys(comparison.RANKED, (0.5, 0.25, 0.1))


def define(flags: app.Flags) -> None:
  without = ("k", "acceptance", "shape", "json", *setup_flags.PROCESSES)
  setup_flags.define(flags, without=without)
  prompt_flags.define(flags)
  flags.integers("sizes", "4,8,16", "Draft tokens of a round.")
  flags.string(
    "only",
    "; ".join(RULES),
    "Rules, with ; between them: calls, as --acceptance of other programs.",
  )
  flags.list("shapes", [*USUAL_SHAPES], "Shapes of drafts, or 'wide tree'.")
  flags.bool("tables", False, "Compare lossy rules on small tables instead.")


def rules_of(options: app.Options) -> tuple[str, ...]:
  return tuple(str(calls.parse(x)) for x in calls.split(options.only, ";"))


def shapes_of(
  options: app.Options, setup: Setup, rates
) -> list[comparison.Shape]:
  """Returns the shapes and rules that the flags ask for."""
  return [
    shape
    for size in options.sizes
    for shape in comparison.shapes_of(setup, size, rates, rules_of(options))
    if shape.name in options.shapes
  ]


def setup_of(options: app.Options) -> Setup:
  """Returns the setup, but for shape and rule, of flags that can work."""
  app.check_at_least(options, 1, "sizes")
  for name in options.shapes:
    if name not in SHAPES:
      raise ValueError(f"--shapes: {choices(name, SHAPES)}")
  if max(options.sizes) > options.max_new_tokens:
    raise ValueError(
      f"a chain of --sizes={max(options.sizes)} never fits into "
      f"--max_new_tokens={options.max_new_tokens}"
    )
  size = evaluation.buffer_size()
  setup = setup_flags.setup_of(options, k=1, prompt_size=size)
  for rule in rules_of(options):
    comparison.rule_of(setup, rule)
  comparison.check_drafter(setup)
  if not shapes_of(options, setup, _SOME_RANKS):
    raise ValueError("none of --only is right for any of --shapes at --sizes")
  return setup


def _of_tables(options: app.Options) -> None:
  """Compares lossy rules on small tables; writes to --output, where given."""
  others = sorted(options.given - {"tables", "output"})
  setup_flags.refuse(options, others, "has no effect with --tables")
  folder = options.output and app.take_folder("--output", options.output)
  if folder:  # another run's results stay
    run_folder.claim(folder, {"tables": True})
  exact = [row._asdict() for row in tabular.of_lossless_rules()]
  terminal.report(lossy_table.of_lossless(exact) + "\n")
  rows = [row._asdict() for row in tabular.at_equal_length()]
  terminal.report(lossy_table.of_equal_length(rows))
  if folder:
    document = provenance.header({"tables": True}, [])
    document |= {"runs": [], "exact": exact, "equal_length": rows}
    results.write_json(str(folder / "results.json"), document)


def compare(options: app.Options) -> None:
  if options.tables:
    return _of_tables(options)
  setup_flags.read(options)
  folder, setup = prompt_flags.read(options), setup_of(options)
  rules = [comparison.with_rule(setup, call) for call in rules_of(options)]
  header = setup_flags.header(options, setup, rules)
  first, *others = (
    shape.setup(setup, shape.rules[0])
    for shape in shapes_of(options, setup, _SOME_RANKS)
  )
  target = first.load_target(app.note, others=others)
  encoded = prompt_flags.corpus(options, target).encoded
  context = max(map(len, encoded))
  setup = dataclasses.replace(
    setup,
    batch=min(setup.batch, len(encoded)),
    prompt_size=evaluation.buffer_size(context),
  )
  bench, most = comparison.Bench(target, encoded), max(options.sizes)
  widest = bench.decoder(dataclasses.replace(setup, k=most))
  lines = prompt_flags.claim(folder, header, widest.params, encoded)
  acceptance = comparison.measure_acceptance(bench, setup, most, lines)
  shapes = shapes_of(options, setup, acceptance)
  runs = comparison.compare(bench, setup, shapes, lines)
  nodes = [most + 1, *(2**i for i in range(1, 20) if 2**i <= most)]
  passes = comparison.time_passes(setup, target, lines, nodes, context)
  tree = comparison.best_tree(runs, acceptance, passes, setup.temperature)
  rules = {comparison.rule_of(setup, r["comparison"]["rule"]) for r in runs}
  lossy = {rule.caveat for rule in rules} - {""}
  caveats = [*header["caveats"], *sorted(lossy)]
  if tree:
    files.replace_text(folder / "tree.json", json.dumps(tree["paths"]) + "\n")
  document = header | {"caveats": caveats, "runs": runs, "tree": tree}
  document["acceptance_by_rank"] = acceptance
  text = tables.of_rules(runs, acceptance, tree, caveats)
  title = f"{setup.target}, {setup.drafter}, temperature {setup.temperature:g}"
  prompt_flags.publish(folder, document, text, title, plots.over_sizes)


main = app.Program(__doc__, define, compare, interrupted=app.CONTINUES)
