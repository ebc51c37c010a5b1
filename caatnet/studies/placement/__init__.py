"""Placement of a training step's tensors on memory tiers."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
