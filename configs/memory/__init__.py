"""Placements on memory tiers."""
