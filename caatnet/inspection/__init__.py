"""Compiled steps: memory, bytes and overlap."""
