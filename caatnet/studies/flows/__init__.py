"""Loads of links under flows and sprayed packets."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
