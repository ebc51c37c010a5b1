"""Nano-batches: a step cut into pieces that overlap, planned and timed."""
