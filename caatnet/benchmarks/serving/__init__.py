"""Benchmarks of decoding, the engine, the scheduler and the server."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
