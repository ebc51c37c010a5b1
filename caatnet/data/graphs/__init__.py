"""Graphs on disk, their generators, loaders and samplers."""
