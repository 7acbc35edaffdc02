"""Runs specdec.cli.compare_training; `--help` says what it does."""

from specdec.cli.compare_training import main

if __name__ == "__main__":
  main.launch()
