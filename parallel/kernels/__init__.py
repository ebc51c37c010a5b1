"""Fused kernels, one package per operation: Pallas, and numba for CPUs."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "selection": ["Choice", "Implementation", "choose"],
})
