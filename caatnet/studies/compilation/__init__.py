"""Compiled steps: memory, bytes and overlap."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["analyse"],
})
