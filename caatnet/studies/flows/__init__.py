"""Loads of links under flows and sprayed packets."""
