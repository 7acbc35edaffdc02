"""Trains a target from scratch, with or without an auxiliary loss.

  python scripts/train_joint.py --config=configs/train/joint.py:prophet \\
    --folder=runs/joint/prophet-0
  python scripts/train_joint.py --config=configs/train/joint.py:none \\
    --config.options.seed=1 --folder=runs/joint/none-1   # any entry, by name
  python scripts/compare_joint.py 'runs/joint/*'

The auxiliary loss is a drafter's (`head_config` and `loss` in the config:
prophet, MTP, Medusa and every other that train_drafter.py trains) or
LayerSkip's (`layer_skip`: random layer dropout, losses at early exits), or
there is none. Its gradient reaches the target. Held-out losses are the
target's, with all layers; tokens per pass are those of the drafter.

The same command again resumes a run that was stopped or killed, to the same
weights bit for bit. The folder gets best/ and last/ (checkpoints that every
program here and transformers load, with the drafter as drafter.safetensors),
metrics.jsonl, TensorBoard's files under tensorboard/ and the resumable state
under checkpoints/.
"""

from specdec.cli import app, training_flags
from specdec.training import train_joint
from specdec.training.setup import JointSetup


def train(options: app.Options) -> None:
  """Checks everything, then trains."""
  setup = training_flags.read(options, JointSetup)
  train_joint.train(setup, app.take_folder("--folder", options.folder))


define = training_flags.define
main = app.Program(__doc__, define, train, interrupted=app.CONTINUES)
