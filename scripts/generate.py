"""Runs specdec.cli.generate; `--help` says what it does."""

from specdec.cli.generate import main

if __name__ == "__main__":
  main.launch()
