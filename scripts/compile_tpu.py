"""Runs specdec.cli.compile_tpu; `--help` says what it does."""

from specdec.cli.compile_tpu import main

if __name__ == "__main__":
  main.launch()
