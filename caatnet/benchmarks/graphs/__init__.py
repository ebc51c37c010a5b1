"""Benchmarks of graph networks: samplers, caches, a large graph."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
