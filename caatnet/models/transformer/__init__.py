"""Transformer with partially synchronised tensor ranks."""

from parallel.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "config": ["TransformerConfig"],
  "model": ["TransformerModel"],
})
