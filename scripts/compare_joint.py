"""Sets runs of train_joint.py side by side: does a second loss help the target?

  for seed in 0 1 2; do for kind in none prophet mtp medusa layerskip; do
    python scripts/train_joint.py --config=configs/train/joint.py:$kind \\
      --config.options.seed=$seed --folder=runs/joint/$kind-$seed
  done; done
  python scripts/compare_joint.py 'runs/joint/*' --json=joint.json

Folders, or patterns of them. A line for each kind:

  loss             the target's own on held-out text after the last step, all
                   layers run and nothing beside it, in nats a token: the mean
                   over seeds and its standard error.
  less none's      the mean over seeds of the difference from the run of kind
                   none with the same seed: same first weights, same batches in
                   the same order. Below 0 the second loss helped. What two runs
                   of a seed share falls out, so this error is the one to read.
  tokens per pass  of the drafter that came of it, on held-out prompts.

Errors are standard errors over seeds. Three seeds have two degrees of freedom:
a difference is no chance at the 5 % level from 4.3 standard errors on, not 2.
Runs that saw unlike data or tokens, or were evaluated by other text, are
refused; so are those that have not ended.
"""

import _folders
import _main
from absl import flags

from specdec.benchmark import provenance, results
from specdec.report import joint_plots
from specdec.training import joint_runs
from specdec.utils import terminal

_JSON = flags.DEFINE_string("json", None, "File that gets all of it as JSON.")
_PICTURE = flags.DEFINE_string(
  "picture", None, "Picture to write: .png, .svg or .pdf."
)


def said(estimate, digits: int) -> str:
  """'1.234 ± 0.005', '-' where there is nothing."""
  if estimate.value is None:
    return "-"
  error = estimate.error
  error = "" if error is None else f" ± {error:.{digits}f}"
  return f"{estimate.value:.{digits}f}{error}"


def table(kinds: list[joint_runs.Kind]) -> str:
  """A line for each kind."""
  header = ("kind", "seeds", "loss", "less none's", "tokens per pass")
  rows = [
    (
      kind.name,
      " ".join(map(str, kind.seeds)),
      said(kind.loss, 4),
      said(kind.difference, 4),
      said(kind.tokens_per_pass, 2),
    )
    for kind in kinds
  ]
  return terminal.columns(header, rows)


def document(kinds: list[joint_runs.Kind]) -> dict:
  """All of it, every run included."""

  def both(estimate):
    return {"value": estimate.value, "error": estimate.error}

  return {
    "kinds": [
      {
        "kind": kind.name,
        "loss": both(kind.loss),
        "difference": both(kind.difference),
        "differences": {str(k): v for k, v in kind.differences.items()},
        "tokens_per_pass": both(kind.tokens_per_pass),
        "runs": [
          {
            "folder": run.folder,
            "seed": run.seed,
            "tokens": run.tokens,
            "loss": run.loss,
            "tokens_per_pass": run.tokens_per_pass,
          }
          for run in kind.runs
        ],
      }
      for kind in kinds
    ],
    "run_settings": kinds[0].runs[0].settings,
  }


def draw(kinds: list[joint_runs.Kind], path: str) -> None:
  """The picture: differences and tokens per pass."""
  apart = [x for x in kinds if x.differences]
  drafting = [x for x in kinds if x.tokens_per_pass.value is not None]
  tokens = kinds[0].runs[0].tokens
  joint_plots.losses(
    [(x.name, x.difference, list(x.differences.values())) for x in apart],
    [
      (x.name, x.tokens_per_pass, [run.tokens_per_pass for run in x.runs])
      for x in drafting
    ],
    path,
    f"Joint training, {tokens / 1e6:.2f} M tokens each: points are seeds, "
    "bars standard errors",
  )


def work(arguments: list[str]) -> None:
  """The whole run."""
  if not arguments:
    raise ValueError("give folders of train_joint.py, or patterns of them")
  for name, path in (("--json", _JSON.value), ("--picture", _PICTURE.value)):
    if path:
      _main.check_writable(name, path)
  runs = [joint_runs.read(folder) for folder in _folders.named(arguments)]
  kinds = joint_runs.compare(runs)
  terminal.report(f"  {runs[0].tokens:,} tokens each")
  terminal.report(table(kinds))
  if _JSON.value:
    settings = {"folders": [run.folder for run in runs]}
    header = provenance.header(settings, [])
    header["format"] = "specdec-joint/1"
    results.write_json(_JSON.value, header | document(kinds))
  if _PICTURE.value:
    draw(kinds, _PICTURE.value)


main = _main.main_of("compare_joint", work, takes_arguments=True)

if __name__ == "__main__":
  _main.start(main)
