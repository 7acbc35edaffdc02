"""Runs specdec.cli.sweep; `--help` says what it does."""

from specdec.cli.sweep import main

if __name__ == "__main__":
  main.launch()
