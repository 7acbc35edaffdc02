"""Inspects compiled programs: lowered steps, HLO, traffic, memory plan."""
