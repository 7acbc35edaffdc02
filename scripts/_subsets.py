"""Subsets of sublayers as questions to Optuna, and where answers are kept."""

from pathlib import Path

import _skips
from absl import flags

from specdec.types import Skip

FLAGS = flags.FLAGS


def library():
  """Optuna, silent.

  Raises:
    ValueError: it is not installed.
  """
  try:
    import optuna
  except ImportError as error:
    raise ValueError(
      "choose_layers searches with Optuna: pip install -e '.[search]'"
    ) from error
  optuna.logging.set_verbosity(optuna.logging.CRITICAL)
  return optuna


def names_of(num_layers: int) -> list[tuple[str, int]]:
  """The questions: (sublayer, layer)."""
  return [(part, i) for part in Skip._fields for i in range(num_layers)]


def answers(skip: Skip, num_layers: int) -> dict[str, bool]:
  """A subset as Optuna keeps it."""
  return {
    f"{part}_{i}": i in getattr(skip, part) for part, i in names_of(num_layers)
  }


def subset(params: dict, num_layers: int) -> Skip:
  """And back."""
  found = {part: [] for part in Skip._fields}
  for part, i in names_of(num_layers):
    if params[f"{part}_{i}"]:
      found[part].append(i)
  return Skip(**{part: tuple(layers) for part, layers in found.items()})


def baseline_ones(num_layers: int) -> list[Skip]:
  """What is tried first."""
  every, other = tuple(range(num_layers)), tuple(range(1, num_layers, 2))
  found = [
    Skip(),
    Skip(other, other),
    Skip(other, ()),
    Skip((), other),
    Skip(every, ()),
  ]
  given = _skips.skip()
  return found if given in found or given is None else [given, *found]


def open_study(folder: Path, num_layers: int):
  """The study of this folder: what it tried before is in it."""
  optuna = library()
  backend = optuna.storages.journal.JournalFileBackend(
    str(folder / "trials.journal")
  )
  study = optuna.create_study(
    study_name="choose_layers",
    storage=optuna.storages.JournalStorage(backend),
    direction="maximize",
    load_if_exists=True,
  )
  # Seeded by what is there: going on does not ask the first questions again.
  study.sampler = optuna.samplers.TPESampler(
    seed=FLAGS.seed + len(study.trials), multivariate=True
  )
  waiting = optuna.trial.TrialState.WAITING
  asked = [trial.params for trial in finished(study)]
  asked += [
    trial.system_attrs["fixed_params"]
    for trial in study.get_trials(states=[waiting])
  ]
  for skip in baseline_ones(num_layers):
    for k in FLAGS.k:
      questions = answers(skip, num_layers) | {"k": k}
      if questions not in asked:  # one that a kill cut short is asked again
        study.enqueue_trial(questions)
  return study


def finished(study) -> list:
  """Trials that have a value; one that was killed has none."""
  return [trial for trial in study.trials if trial.value is not None]
