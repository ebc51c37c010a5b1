"""Nano-batches: a step cut into pieces that overlap, planned and timed."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "nanobatch": ["Costs", "Plan", "Reduction", "plan"],
})
