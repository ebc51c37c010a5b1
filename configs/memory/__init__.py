"""Configs that place tensors on memory tiers."""
