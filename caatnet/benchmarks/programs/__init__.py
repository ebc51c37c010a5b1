"""Benchmarks of kernels and of compiled programs."""
