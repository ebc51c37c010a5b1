"""Benchmark of the planner: device orders, compared with other searches."""
