"""Declarations of config keys: one dataclass per section."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "fields": ["Range", "field", "section"],
  "tree": ["check", "defaults"],
})
