"""Federated learning: a server that does not train, and its clients."""
