"""Runs specdec.cli.compare_joint; `--help` says what it does."""

from specdec.cli.compare_joint import main

if __name__ == "__main__":
  main.launch()
