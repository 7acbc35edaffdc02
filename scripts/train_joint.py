"""Runs specdec.cli.train_joint; `--help` says what it does."""

from specdec.cli.train_joint import main

if __name__ == "__main__":
  main.launch()
