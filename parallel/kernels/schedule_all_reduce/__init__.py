"""All-reduce that executes a schedule's table."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["schedule_all_reduce"],
})
