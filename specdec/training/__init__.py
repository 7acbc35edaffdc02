"""Training of targets and drafters: data, losses, loop and checkpoints."""
