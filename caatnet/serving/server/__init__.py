"""HTTP server with OpenAI's API, and a client that measures it."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "client": ["Question", "summary"],
})
