"""Collective schedules as data: construction, proof and conversion."""
