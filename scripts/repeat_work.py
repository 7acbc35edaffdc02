"""Runs specdec.cli.repeat_work; `--help` says what it does."""

from specdec.cli.repeat_work import main

if __name__ == "__main__":
  main.launch()
