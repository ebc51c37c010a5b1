"""Placement of tensors on memory tiers, and slots and caches of a device."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "costs": ["Cost", "Placement", "cost"],
  "policies": ["POLICIES", "place"],
})
