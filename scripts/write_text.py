"""Runs specdec.cli.write_text; `--help` says what it does."""

from specdec.cli.write_text import main

if __name__ == "__main__":
  main.launch()
