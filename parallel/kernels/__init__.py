"""Fused Pallas kernels, one package per operation."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "selection": ["Choice", "Implementation", "choose"],
})
