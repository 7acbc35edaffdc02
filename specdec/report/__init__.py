"""Formats results: terminal tables, pages and plots."""
