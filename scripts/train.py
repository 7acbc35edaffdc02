"""Runs specdec.cli.train; `--help` says what it does."""

from specdec.cli.train import main

if __name__ == "__main__":
  main.launch()
