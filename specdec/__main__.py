"""Runs the command `specdec NAME` as `python -m specdec NAME`."""

from specdec.cli.console import main

if __name__ == "__main__":
  main()
