"""Runs specdec.cli.goodput; `--help` says what it does."""

from specdec.cli.goodput import main

if __name__ == "__main__":
  main.launch()
