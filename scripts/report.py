"""Runs specdec.cli.report; `--help` says what it does."""

from specdec.cli.report import main

if __name__ == "__main__":
  main.launch()
