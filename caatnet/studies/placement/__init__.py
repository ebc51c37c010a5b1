"""Placement of a training step's tensors on memory tiers."""
