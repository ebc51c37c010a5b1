"""Benchmarks of elastic membership: faults, ring sums, protocol search."""
