"""Runs specdec.cli.count_experts; `--help` says what it does."""

from specdec.cli.count_experts import main

if __name__ == "__main__":
  main.launch()
