"""Measurements of memory tiers."""
