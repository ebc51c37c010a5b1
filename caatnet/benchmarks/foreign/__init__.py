"""Programs of other projects: what they send, and rounds of Flower."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
