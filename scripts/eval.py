"""Runs specdec.cli.eval; `--help` says what it does."""

from specdec.cli.eval import main

if __name__ == "__main__":
  main.launch()
