"""Measures decoding: prompts, sessions, timing, metrics, results."""
