"""Searches the sublayers that a layer-skipping draft should leave out.

Draft & Verify (arXiv:2309.08168): 2 L yes-or-no questions and the length of the
drafts, answered by Optuna's tree-structured Parzen estimator: it suits
categories, and Optuna's Gaussian process would need torch.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from specdec.benchmark import deployments, metrics, runs, timing
from specdec.benchmark.batches import batches_of
from specdec.benchmark.comparison import Bench
from specdec.benchmark.setup import Setup
from specdec.benchmark.target import Target
from specdec.roofline import drafter_cost
from specdec.roofline.chips import Chip
from specdec.roofline.cost import TYPICAL
from specdec.roofline.round_cost import round_cost
from specdec.types import Skip
from specdec.utils.calls import Call


class Value(NamedTuple):
  """What one subset is worth."""

  rate: float  # tokens per second, the objective
  tokens_per_round: float
  drafted_per_round: float


def drafter_of(skip: Skip, threshold: float | None = None) -> str:
  """Returns the call of a drafter that leaves a subset out."""
  arguments = {name: list(layers) for name, layers in skip._asdict().items()}
  if threshold is not None:
    arguments["threshold"] = threshold
  return str(Call(None, "layer_skip", (), arguments))


class SkipBench:
  """Measures or predicts decoding of some texts with a subset left out.

  Attributes:
    num_layers: layers of the target.
  """

  def __init__(
    self,
    setup: Setup,
    target: Target,
    rows: Sequence[Sequence[int]],
    threshold: float | None = None,
    timings: int = 1,
    chip: Chip | None = None,
  ):
    """Args:
    setup: of all but the drafter and k.
    rows: prompts.
    threshold: where drafting stops; None: k tokens always.
    timings: of each subset, after it ran once.
    chip: predicts its times; None: measures.
    """
    self._setup, self._threshold, self._timings = setup, threshold, timings
    self._bench, self._chip = Bench(target, rows, pilots=True), chip
    self.num_layers = target.model.num_layers

  def _compare(
    self, skip: Skip, k: int, repeats: int, baseline: bool
  ) -> tuple[runs.Comparison, list[float]]:
    """Decodes with one subset, after everything ran once; returns that, and of
    each way the median over repeats of tokens per second."""
    drafter = drafter_of(skip, self._threshold)
    setup = dataclasses.replace(self._setup, drafter=drafter, k=k)
    batches = batches_of(self._bench.encoded, setup.batch)
    layers = f"{len(skip.attention)} attention and {len(skip.mlp)} MLP layers"
    what = f"k = {k} without {layers}"
    ways = self._bench.ways(setup, batches[0].rows, what, baseline)
    comparison, rates = runs.compare(ways, batches, repeats), []
    for name in ways:
      completed = comparison.of(name)
      tokens = np.reshape([one.num_tokens for one in completed], (repeats, -1))
      seconds = np.reshape([one.seconds for one in completed], (repeats, -1))
      rates.append(float(np.median(tokens.sum(1) / seconds.sum(1))))
    return comparison, rates

  def value(self, skip: Skip, k: int) -> Value:
    """Returns tokens per second with this subset."""
    repeats = 1 if self._chip else self._timings
    comparison, [rate] = self._compare(skip, k, repeats, False)
    once = comparison.distinct(runs.OURS)
    counts = metrics.acceptance([one.stats for one in once])
    tokens = counts.emitted / counts.target_passes
    drafted = counts.drafted / counts.target_passes
    if self._chip:
      seconds = self._round_seconds(skip, k, drafted)
      rate = self._setup.batch * tokens / seconds
    return Value(rate, tokens, drafted)

  def _round_seconds(self, skip: Skip, k: int, drafted: float) -> float:
    """Predicts a round with all rows at work, with a mean of tokens drafted."""
    setup, target = self._setup, self._bench.target
    deployment = dataclasses.replace(
      deployments.target_deployment(setup, target, self._chip),
      efficiency=TYPICAL,
    )
    cost = drafter_cost.layer_skip(target.checkpoint.config, skip)
    where = setup.batch, setup.max_length(target.checkpoint.config)
    lengths = range(k + 1)
    seconds = [round_cost(deployment, cost, n, *where).seconds for n in lengths]
    return float(np.interp(drafted, lengths, seconds))

  def against_baseline(self, skip: Skip, k: int) -> list[float]:
    """Returns tokens per second of a subset and of the baseline, interleaved:
    the best of many timings was lucky, too."""
    return self._compare(skip, k, 2 * self._timings, True)[1]


def library() -> Any:
  """Returns Optuna, silent."""
  try:
    import optuna
  except ImportError as error:
    raise ValueError(
      "the search for layers needs Optuna: pip install -e '.[search]'"
    ) from error
  optuna.logging.set_verbosity(optuna.logging.CRITICAL)
  return optuna


def subset(params: dict[str, Any], num_layers: int) -> Skip:
  """Returns the subset that a trial's parameters describe."""
  layers = range(num_layers)
  return Skip(
    *(tuple(i for i in layers if params[f"{x}_{i}"]) for x in Skip._fields)
  )


def _answers(skip: Skip, num_layers: int) -> dict[str, bool]:
  """A trial's parameters, but for k, that describe the subset."""
  return {
    f"{part}_{i}": i in layers
    for part, layers in skip._asdict().items()
    for i in range(num_layers)
  }


def open_study(
  folder: Path, num_layers: int, ks: Sequence[int], seed: int, first: Skip
):
  """Opens the Optuna study of a folder, with what it tried before; `first` is
  tried before all others."""
  optuna = library()
  journal = optuna.storages.journal.JournalFileBackend(
    str(folder / "trials.journal")
  )
  study = optuna.create_study(
    study_name="choose_layers",
    storage=optuna.storages.JournalStorage(journal),
    direction="maximize",
    load_if_exists=True,
  )
  # Seeded by what is there: a resumed search does not repeat its first draws.
  study.sampler = optuna.samplers.TPESampler(
    seed=seed + len(study.trials), multivariate=True
  )
  waiting = study.get_trials(states=[optuna.trial.TrialState.WAITING])
  asked = [trial.params for trial in finished(study)]
  asked += [trial.system_attrs["fixed_params"] for trial in waiting]
  every, other = tuple(range(num_layers)), tuple(range(1, num_layers, 2))
  skips = [Skip(other, other), Skip(other), Skip((), other), Skip(every)]
  for skip in dict.fromkeys([first, Skip(), *skips]):
    for k in ks:
      answers = _answers(skip, num_layers) | {"k": k}
      if answers not in asked:  # one that a kill cut short is asked again
        study.enqueue_trial(answers)
  return study


def finished(study) -> list:
  """Returns the trials that have a value; one that was killed has none."""
  return [trial for trial in study.trials if trial.value is not None]


def search(study, bench: SkipBench, ks: Sequence[int], trials: int) -> None:
  """Tries subsets until there are so many trials."""

  def rate(trial) -> float:
    for name in _answers(Skip(), bench.num_layers):
      trial.suggest_categorical(name, [False, True])
    k = trial.suggest_categorical("k", list(ks))
    same = [x for x in finished(study) if x.params == trial.params]
    if same:  # a subset compiles once
      value = Value(same[0].value, **same[0].user_attrs)
    else:
      value = bench.value(subset(trial.params, bench.num_layers), k)
      timing.forget_programs()
    for name in Value._fields[1:]:
      trial.set_user_attr(name, getattr(value, name))
    return value.rate

  before = min(len(finished(study)), trials)
  with tqdm(total=trials, initial=before, unit="trial") as progress:

    def report(study, trial) -> None:
      best = study.best_trial
      progress.set_postfix_str(f"best {best.value:.4g} tokens/s")
      progress.update()

    study.optimize(rate, trials - before, callbacks=[report])


def documents(study, num_layers: int) -> list[dict]:
  """Returns the finished trials as skip.json has them, in their order."""
  return [
    {
      f"skip_{part}": list(layers)
      for part, layers in subset(trial.params, num_layers)._asdict().items()
    }
    | {"k": trial.params["k"], "tokens_per_second": trial.value}
    | trial.user_attrs
    for trial in finished(study)
  ]
