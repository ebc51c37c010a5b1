"""``config.benchmark``: one section per benchmark."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
