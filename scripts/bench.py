"""Runs specdec.cli.bench; `--help` says what it does."""

from specdec.cli.bench import main

if __name__ == "__main__":
  main.launch()
