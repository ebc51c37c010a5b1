"""Bodies of launch.benchmark, by subject, and the harness that they share."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
