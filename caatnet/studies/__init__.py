"""Predictions, one package per study."""
