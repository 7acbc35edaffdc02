"""Trains a drafter that reads the target's hidden states; the target is frozen.

  python scripts/train_drafter.py --config=configs/train/drafter.py:prophet \\
    --folder=runs/prophet
  python scripts/train_drafter.py ... --config.options.steps=50  # any entry
  python scripts/generate.py --drafter='prophet(runs/prophet/best.safetensors)'

The same command again resumes a run that was stopped or killed, to the same
weights bit for bit. The folder gets best.safetensors and last.safetensors (the
drafter: head config, vocabulary, weights), metrics.jsonl, TensorBoard's files
under tensorboard/ and the resumable state under checkpoints/. At every
evaluation the drafter decodes held-out prompts with the real loop and rule,
which is what it is worth; acceptance_j and agreement_j in the log have the text
itself as prefix.
"""

from specdec.cli import app, training_flags
from specdec.training import train_drafter
from specdec.training.setup import HeadSetup


def train(options: app.Options) -> None:
  """Checks everything, then trains."""
  setup = training_flags.read(options, HeadSetup)
  train_drafter.train(setup, app.take_folder("--folder", options.folder))


define = training_flags.define
main = app.Program(__doc__, define, train, interrupted=app.CONTINUES)
