"""Inference: decoding with a paged cache, sampling, and scoring."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "decoder": ["Capacity", "Decoder"],
  "stops": ["Stops"],
  "transcripts": ["Transcript"],
})
