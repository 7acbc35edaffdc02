"""Runs specdec.cli.write_answers; `--help` says what it does."""

from specdec.cli.write_answers import main

if __name__ == "__main__":
  main.launch()
