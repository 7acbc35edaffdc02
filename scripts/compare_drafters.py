"""Runs specdec.cli.compare_drafters; `--help` says what it does."""

from specdec.cli.compare_drafters import main

if __name__ == "__main__":
  main.launch()
