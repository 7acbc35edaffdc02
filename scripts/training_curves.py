"""Runs specdec.cli.training_curves; `--help` says what it does."""

from specdec.cli.training_curves import main

if __name__ == "__main__":
  main.launch()
