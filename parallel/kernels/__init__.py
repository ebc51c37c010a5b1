"""Fused kernels, one package per operation: Pallas, and numba for CPUs."""
