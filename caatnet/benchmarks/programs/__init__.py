"""Benchmarks of kernels and of compiled programs."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
