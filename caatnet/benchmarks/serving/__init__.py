"""Benchmarks of decoding, of the scheduler and of the server."""
