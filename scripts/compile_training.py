"""Runs specdec.cli.compile_training; `--help` says what it does."""

from specdec.cli.compile_training import main

if __name__ == "__main__":
  main.launch()
