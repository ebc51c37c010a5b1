"""Continuous batching: admission, preemption and swapping of requests."""
