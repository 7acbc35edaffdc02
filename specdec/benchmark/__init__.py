"""Measures decoding: setups, decoders, comparison, timing, metrics, results."""
