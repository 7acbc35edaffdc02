"""Runs specdec.cli.reproduce; `--help` says what it does."""

from specdec.cli.reproduce import main

if __name__ == "__main__":
  main.launch()
