"""Training: experiment, training step, loop, checkpoints and metrics."""
