"""Runs specdec.cli.compare_engines; `--help` says what it does."""

from specdec.cli.compare_engines import main

if __name__ == "__main__":
  main.launch()
