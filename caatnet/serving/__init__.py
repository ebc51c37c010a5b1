"""Serving: scheduling, paged cache, execution and HTTP server."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "requests": ["Request", "State"],
  "traces": ["Sessions", "load", "scaled"],
})
