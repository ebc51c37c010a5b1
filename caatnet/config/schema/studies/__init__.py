"""Configs of studies: one section per study."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
