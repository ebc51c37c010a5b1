"""Models and the protocol by which training and inference use them."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "access": ["Access"],
  "protocol": ["LanguageModel", "Model", "Parameter", "Parts", "Reduction"],
})
