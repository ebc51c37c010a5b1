"""Gather of table rows in host memory by index."""
