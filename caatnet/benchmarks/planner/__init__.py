"""Benchmarks of the planner: device orders, memory, measured clusters."""
