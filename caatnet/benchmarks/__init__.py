"""Bodies of launch.benchmark; none has a public name."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
