"""Predicted federated rounds over links, and the figures of a 5G testbed."""
