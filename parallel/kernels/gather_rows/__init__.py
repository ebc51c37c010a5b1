"""Gather of table rows in host memory by index."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["gather_rows"],
})
