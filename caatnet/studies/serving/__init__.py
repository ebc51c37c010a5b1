"""Latency, preemption and fairness of a simulated server."""
