"""Programs of other projects, and what they send."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
