"""Runs specdec.cli.invent_prompts; `--help` says what it does."""

from specdec.cli.invent_prompts import main

if __name__ == "__main__":
  main.launch()
