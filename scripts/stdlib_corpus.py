"""Runs specdec.cli.stdlib_corpus; `--help` says what it does."""

from specdec.cli.stdlib_corpus import main

if __name__ == "__main__":
  main.launch()
