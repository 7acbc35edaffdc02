"""Runs specdec.cli.export; `--help` says what it does."""

from specdec.cli.export import main

if __name__ == "__main__":
  main.launch()
