"""Runs specdec.cli.choose_layers; `--help` says what it does."""

from specdec.cli.choose_layers import main

if __name__ == "__main__":
  main.launch()
