"""Drafters trained on the target's hidden states, and what they share."""
