"""Scheduling policies: admission order and preemption order of requests."""
