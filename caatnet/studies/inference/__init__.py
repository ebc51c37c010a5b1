"""Times of decoding by formula and by profile."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
