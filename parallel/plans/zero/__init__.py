"""Partitions of the training state, and their bytes in closed form."""
