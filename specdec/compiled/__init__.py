"""Looks into compiled programs: steps, HLO, traffic, memory plan."""
