"""Runs specdec.cli.convert; `--help` says what it does."""

from specdec.cli.convert import main

if __name__ == "__main__":
  main.launch()
