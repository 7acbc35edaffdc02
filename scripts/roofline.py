"""Runs specdec.cli.roofline; `--help` says what it does."""

from specdec.cli.roofline import main

if __name__ == "__main__":
  main.launch()
