"""Bytes and periods of outer loops in closed form."""
