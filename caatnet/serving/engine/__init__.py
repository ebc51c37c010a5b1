"""Execution of scheduled steps, on a device or in a simulator."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "engine": ["Engine"],
})
