"""Block codecs for means of deltas: encoding, decoding and outer steps."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "api": ["decode", "encode", "encode_delta", "mean", "nesterov", "total"],
  "reference": ["Codec", "Encoded"],
})
