"""Cache lines that a GPU reads when it gathers rows of features."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "study": ["run"],
})
