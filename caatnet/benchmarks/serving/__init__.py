"""Benchmarks of decoding, the engine, the scheduler and the server."""
