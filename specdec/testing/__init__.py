"""Exact checks: a table model and enumeration of whole distributions."""
