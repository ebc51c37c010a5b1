"""Compute utilisation of outer loops."""
