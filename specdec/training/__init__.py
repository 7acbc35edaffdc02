"""Training: data, losses, the loop and its checkpoints."""
