"""Looks for the sublayers that a layer-skipping draft should leave out.

  python scripts/choose_layers.py --output=runs/skip       # the shipped target
  python scripts/generate.py --skip=runs/skip/skip.json    # and its use
  python scripts/choose_layers.py --target=smollm2-135m-instruct --chat \\
    --prompt_file=P.jsonl --k=2,4,6 --trials=200 --output=runs/smollm2
  python scripts/choose_layers.py --objective=predicted --for_chip=v5e ...

Draft & Verify (arXiv:2309.08168): the target drafts for itself with some of its
attentions and MLPs left out. Which ones is a question of 2 L yes or no, whose
answer is tokens per second; Bayesian optimisation asks it of --trials subsets.
The first ones tried are plain: nothing, every second layer, every second
attention or MLP, all attentions, and --skip if given. With several --k the
length of the drafts is looked for as well, with --exit_threshold they stop at
unlikely tokens and --k is the most.

  measured   (default) tokens of the texts / seconds of the decoding rounds, the
             median of --timings: the real loop on this machine. Each subset is
             a program of its own, which takes seconds to compile.
  predicted  the draft tokens are counted in the real loop, a round's time comes
  from
             the cost model: for a chip that is not here, and without noise.

Optuna's tree-structured Parzen estimator chooses: 2 L categories suit it, and
of Optuna's samplers the Gaussian process needs torch. The texts are --samples
prompts of --context tokens, --batch at a time; what the search never saw
decides what it is worth, so measure the answer on other prompts (eval.py).

The output folder gets trials.journal as trials finish, then skip.json: the best
subset, timed once more in turns with autoregressive decoding, and all trials.
The same command goes on where it was stopped or killed; more --trials add to
it.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import _decoding
import _flags
import _main
import _mesh
import _output
import _rows
import _skips
import _subsets
import numpy as np
from _integers import spans
from absl import flags
from tqdm import tqdm

from specdec import drafters
from specdec.benchmark import results, runs, timing
from specdec.benchmark.decoder import batches_of
from specdec.roofline import chips, hardware, shapes
from specdec.roofline.cost import TYPICAL, Deployment
from specdec.types import Skip
from specdec.utils import files, terminal
from specdec.utils.terminal import columns

_BEFORE = set(flags.FLAGS) - {"output", "context"}
flags.DEFINE_integer("trials", 60, "Subsets tried, those of earlier runs, too.")
flags.DEFINE_integer("samples", 4, "Prompts that are decoded.")
flags.DEFINE_integer("timings", 3, "Of a subset, after it ran once.")
flags.DEFINE_enum(
  "objective", "measured", ("measured", "predicted"), "Tokens per second."
)
flags.DEFINE_string(
  "for_chip",
  "local",
  f"Of --objective=predicted: one of {', '.join(chips.CHIPS)}, or local.",
)
FLAGS = flags.FLAGS
for _module in (_flags, _output, _rows):  # or --help would leave them out
  flags.adopt_module_key_flags(_module)
_OWN = sorted({*FLAGS} - _BEFORE | {"output", "context"})
FLAG_NAMES = [*_flags.SHARED, *_OWN]
# What may change when a run goes on.
_FREE = ("output", "json", "trials", "compilation_cache", *_mesh.PROCESSES)
_OURS = "speculative"
_SHOWN = 5  # of the best


class Found(NamedTuple):
  """What one subset is worth."""

  rate: float  # tokens per second, the objective
  tokens_per_round: float
  drafted_per_round: float


def check_flags() -> None:
  """Refuses what cannot work, before anything long begins."""
  if not FLAGS.output:
    raise ValueError("give --output, the folder of the results")
  if FLAGS.drafter not in (None, "layer_skip"):
    raise ValueError(f"--drafter={FLAGS.drafter}: layer_skip is what is chosen")
  if FLAGS.distributed:
    raise ValueError("--distributed is for generate, bench, sweep and train")
  if FLAGS.shape != "chain":
    raise ValueError(f"--shape={FLAGS.shape}: it is searched with chains")
  for name in ("trials", "samples", "timings", "context"):
    if FLAGS[name].value < 1:
      raise ValueError(f"--{name}={FLAGS[name].value}; it must be >= 1")
  if FLAGS.for_chip != "local":
    chips.get(FLAGS.for_chip)  # is it known?
    if FLAGS.objective == "measured":
      raise ValueError("--for_chip is for --objective=predicted")
  _main.take_folder("--output", FLAGS.output)


class Texts:
  """Texts, and what a subset makes of them."""

  def __init__(self, models):
    self.models, self.batch = models, _flags.single("batch")
    rows = _rows.make_rows(models.target, FLAGS.samples, FLAGS.context)
    self._batches = batches_of(rows, self.batch)
    if FLAGS.objective == "predicted":
      if FLAGS.for_chip == "local":
        machine = hardware.local(
          progress=lambda s: terminal.report(s, file=sys.stderr)
        )
        self._chip = chips.of_hardware(machine)
      else:
        self._chip = chips.get(FLAGS.for_chip)

  def decoder(self, skip: Skip, k: int):
    """Builds the decoder of one subset, compiled and run once."""
    model = self.models.target_model
    drafter = drafters.layer_skip(model, skip, k, _skips.threshold())
    decoder = _decoding.decoder_of(
      self.models, drafter, _decoding.rule(), self.batch, FLAGS.context, ()
    )
    layers = len(skip.attention), len(skip.mlp)
    what = "without {} attention and {} MLP layers".format(*layers)
    with terminal.progress(f"compiling k = {k} {what}"):
      runs.compare({_OURS: decoder}, self._batches)
    return decoder

  def value(self, skip: Skip, k: int) -> Found:
    """Returns tokens per second with this subset."""
    timings = FLAGS.timings if FLAGS.objective == "measured" else 1
    decoders = {_OURS: self.decoder(skip, k)}
    comparison = runs.compare(decoders, self._batches, timings)
    once = comparison.distinct(_OURS)
    tokens = sum(one.num_tokens for one in once)
    rounds, nodes = (
      sum(int(np.sum(getattr(one.stats, name))) for one in once)
      for name in ("rounds", "nodes")
    )
    if FLAGS.objective == "measured":
      rate = self._median_rate(comparison, _OURS)
    else:
      rate = self._predicted(skip, tokens / rounds, nodes / rounds)
    return Found(rate, tokens / rounds, nodes / rounds)

  def _median_rate(self, comparison: runs.Comparison, name: str) -> float:
    """Returns the median over repeats of tokens per second."""
    completed, count = comparison.of(name), len(self._batches)
    parts = [completed[i : i + count] for i in range(0, len(completed), count)]
    return statistics.median(
      sum(one.num_tokens for one in part) / sum(one.seconds for one in part)
      for part in parts
    )

  def _predicted(self, skip: Skip, tokens: float, drafted: float) -> float:
    """By the cost model, all rows at work."""
    context = FLAGS.context + FLAGS.max_new_tokens

    def seconds(skip, tokens):
      deployment = Deployment(
        shapes.of_config(self.models.target.config, skip=skip),
        self._chip,
        weights=FLAGS.dtype,
        kv=FLAGS.dtype,
        efficiency=TYPICAL,
      )
      return deployment.cost(self.batch, tokens, context).seconds

    taken = drafted * seconds(skip, 1) + seconds(None, 1 + drafted)
    return self.batch * tokens / taken

  def against_baseline(self, skip: Skip, k: int) -> tuple[float, float]:
    """Returns tokens per second of a subset and of the baseline, interleaved:
    the best of many timings was lucky, too."""
    decoder = self.decoder(skip, k)
    decoders = {_OURS: decoder, runs.BASELINE: decoder.baseline()}
    runs.compare(decoders, self._batches)  # compiles and warms up
    comparison = runs.compare(decoders, self._batches, 2 * FLAGS.timings)
    return tuple(self._median_rate(comparison, name) for name in decoders)


def search(study, texts: Texts, num_layers: int) -> None:
  """Tries subsets until there are --trials of them."""

  def worth(trial) -> float:
    for part, i in _subsets.names_of(num_layers):
      trial.suggest_categorical(f"{part}_{i}", [False, True])
    k = trial.suggest_categorical("k", list(FLAGS.k))
    for other in _subsets.finished(study):  # a subset compiles once
      if other.params == trial.params:
        found = Found(other.value, **other.user_attrs)
        break
    else:
      found = texts.value(_subsets.subset(trial.params, num_layers), k)
      timing.forget_programs()
    for name in Found._fields[1:]:
      trial.set_user_attr(name, getattr(found, name))
    return found.rate

  before = min(len(_subsets.finished(study)), FLAGS.trials)
  with tqdm(total=FLAGS.trials, initial=before, unit="trial") as progress:

    def said(study, trial):
      best = study.best_trial
      progress.set_postfix_str(f"best {best.value:.4g} tokens/s")
      progress.update()

    study.optimize(worth, FLAGS.trials - before, callbacks=[said])


def as_lines(trials, num_layers: int) -> list[dict]:
  """Trials for the document, in the order they were tried."""
  found = []
  for trial in trials:
    skip = _subsets.subset(trial.params, num_layers)
    found.append(
      {
        "skip_attention": list(skip.attention),
        "skip_mlp": list(skip.mlp),
        "k": trial.params["k"],
        "tokens_per_second": trial.value,
      }
      | trial.user_attrs
    )
  return found


def table(lines: list[dict]) -> str:
  """Nothing skipped, then the best ones."""
  header = ["", "attention skipped", "MLP skipped", "k", "drafted/round"]
  header += ["tokens/round", "tokens/s"]
  distinct = {json.dumps(line): line for line in lines}
  ranked = sorted(
    distinct.values(), key=lambda line: -line["tokens_per_second"]
  )
  rows = [(str(n), line) for n, line in enumerate(ranked[:_SHOWN], 1)]
  nothing = [x for x in ranked if not (x["skip_attention"] + x["skip_mlp"])]
  rows += [("-", line) for line in nothing[:1]]
  return columns(
    header,
    [
      [
        place,
        spans(line["skip_attention"]) or "none",
        spans(line["skip_mlp"]) or "none",
        str(line["k"]),
        f"{line['drafted_per_round']:.2f}",
        f"{line['tokens_per_round']:.2f}",
        f"{line['tokens_per_second']:.1f}",
      ]
      for place, line in rows
    ],
  )


def choose_layers() -> None:
  """The whole run: check, load, search, measure the best, report."""
  named = FLAGS.skip or _skips.skip() is not None
  if FLAGS.drafter in (None, "layer_skip") and not named:
    FLAGS.skip_mlp = ()  # nothing, so far
  _flags.settle(_OWN)
  check_flags()
  _subsets.library()
  folder = Path(FLAGS.output)
  header = _decoding.header(_OWN)
  models = _decoding.load(FLAGS.context + FLAGS.max_new_tokens)
  num_layers = models.target.config.num_layers
  files.claim(
    folder,
    header["settings"] | {"versions": header["versions"]},
    _FREE,
  )
  texts, study = Texts(models), _subsets.open_study(folder, num_layers)
  search(study, texts, num_layers)
  lines = as_lines(_subsets.finished(study), num_layers)
  best = max(lines, key=lambda line: line["tokens_per_second"])
  terminal.report(table(lines))
  terminal.report("\ntiming the best once more ...", file=sys.stderr)
  skip = _subsets.subset(study.best_params, num_layers)
  ours, baseline = texts.against_baseline(skip, best["k"])
  document = (
    header
    | best
    | {
      "exit_threshold": FLAGS.exit_threshold,
      "objective": FLAGS.objective,
      "measured_tokens_per_second": ours,
      "baseline_tokens_per_second": baseline,
      "speedup": ours / baseline,
      "trials": lines,
    }
  )
  text = json.dumps(document, indent=1, allow_nan=False) + "\n"
  files.replace_text(folder / "skip.json", text)
  if FLAGS.json:
    results.write_json(FLAGS.json, document)
  terminal.report(
    f"\nin turns: {ours:.1f} tokens/s, baseline {baseline:.1f}: "
    f"{ours / baseline:.2f} x"
    f"\nuse it: --skip={folder / 'skip.json'}"
  )
  for caveat in document["caveats"]:
    terminal.report(f"warning: {caveat}")


main = _main.main_of(
  "choose_layers",
  choose_layers,
  interrupted="stopped; the same command goes on from here",
)

if __name__ == "__main__":
  _main.start(main)
