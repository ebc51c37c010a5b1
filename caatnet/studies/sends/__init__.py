"""What any jax program sends: its functions, and a report."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "foreign": ["read"],
})
