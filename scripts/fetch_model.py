"""Runs specdec.cli.fetch_model; `--help` says what it does."""

from specdec.cli.fetch_model import main

if __name__ == "__main__":
  main.launch()
