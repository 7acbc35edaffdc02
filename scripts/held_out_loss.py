"""Runs specdec.cli.held_out_loss; `--help` says what it does."""

from specdec.cli.held_out_loss import main

if __name__ == "__main__":
  main.launch()
