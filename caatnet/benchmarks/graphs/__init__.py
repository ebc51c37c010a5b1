"""Benchmarks of graph networks: samplers, caches, a large graph."""
