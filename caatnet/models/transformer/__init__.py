"""Transformer with partially synchronised tensor ranks."""
