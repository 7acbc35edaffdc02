"""Runs specdec.cli.plot; `--help` says what it does."""

from specdec.cli.plot import main

if __name__ == "__main__":
  main.launch()
