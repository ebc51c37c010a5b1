"""Models, and what training asks of one."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "access": ["Access"],
  "protocol": ["LanguageModel", "Model", "Parameter", "Parts", "Reduction"],
})
