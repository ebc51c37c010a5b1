"""Benchmarks of the planner: device orders, memory, measured clusters."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
