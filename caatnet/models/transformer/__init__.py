"""Transformer with partially synchronised tensor ranks."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "config": ["TransformerConfig"],
  "model": ["TransformerModel"],
})
