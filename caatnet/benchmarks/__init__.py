"""Benchmarks for launch.benchmark, by subject, and their common harness."""
