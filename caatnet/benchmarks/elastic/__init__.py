"""Benchmarks of elastic membership: churn, rings, protocol state search."""
