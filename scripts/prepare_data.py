"""Runs specdec.cli.prepare_data; `--help` says what it does."""

from specdec.cli.prepare_data import main

if __name__ == "__main__":
  main.launch()
