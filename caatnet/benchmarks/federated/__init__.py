"""Federated runs over emulated links, and their predicted times."""
