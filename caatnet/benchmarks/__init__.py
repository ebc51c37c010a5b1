"""Bodies of launch.benchmark, by subject, and their common harness."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
