"""Checkpoints that are independent of the mesh."""
