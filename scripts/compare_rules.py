"""Runs specdec.cli.compare_rules; `--help` says what it does."""

from specdec.cli.compare_rules import main

if __name__ == "__main__":
  main.launch()
