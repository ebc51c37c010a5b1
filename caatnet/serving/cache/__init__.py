"""Page accounting of the key-value cache, on the device and on the host."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {})
