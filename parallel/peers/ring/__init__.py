"""Reductions over links between peers, and bandwidth measurement."""
