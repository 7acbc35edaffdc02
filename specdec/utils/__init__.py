"""Utilities for files, terminal output and error messages."""
