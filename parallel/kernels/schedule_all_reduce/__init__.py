"""All-reduce kernel that executes the table of a schedule."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["schedule_all_reduce"],
})
