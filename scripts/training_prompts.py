"""Runs specdec.cli.training_prompts; `--help` says what it does."""

from specdec.cli.training_prompts import main

if __name__ == "__main__":
  main.launch()
