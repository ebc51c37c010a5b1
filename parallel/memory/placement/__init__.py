"""Placement of a training step's tensors on memory tiers: policies and cost."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "costs": ["Cost", "Placement", "cost"],
  "policies": ["POLICIES", "place"],
})
