"""Benchmarks of elastic membership: churn, rings, protocol state search."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
