"""Measurements of memory tiers."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "measured_tiers": ["measure"],
})
