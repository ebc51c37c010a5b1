"""``config.benchmark``: one section per benchmark."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
