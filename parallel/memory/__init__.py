"""Feature tables in host memory, and caches of their rows on devices."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "caches": ["belady", "lru", "most_frequent"],
  "features": ["Lookup", "Table"],
})
