"""Runs specdec.cli.train_drafter; `--help` says what it does."""

from specdec.cli.train_drafter import main

if __name__ == "__main__":
  main.launch()
