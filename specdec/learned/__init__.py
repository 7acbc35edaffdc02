"""Drafters that are trained: what all of them share."""
