"""Runs specdec.cli.beam_search; `--help` says what it does."""

from specdec.cli.beam_search import main

if __name__ == "__main__":
  main.launch()
