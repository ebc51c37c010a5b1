"""Planner of nano-batches, parts of a step's tokens that overlap in time."""
