"""Decoding times from closed forms and from profiles."""
