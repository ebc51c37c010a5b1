"""Training and decoding, compared with other projects on one machine."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
