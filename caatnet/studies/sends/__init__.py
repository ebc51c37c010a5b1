"""Communication of any jax program: its readings, a report, a timeline."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "foreign": ["measured", "read"],
})
