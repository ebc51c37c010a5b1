"""Collective schedules as data: construction, proof and execution."""
