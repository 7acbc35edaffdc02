"""Runs specdec.cli.train_tokenizer; `--help` says what it does."""

from specdec.cli.train_tokenizer import main

if __name__ == "__main__":
  main.launch()
