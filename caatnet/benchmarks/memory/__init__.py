"""Measurements of memory tiers."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "measured_tiers": ["measure"],
})
