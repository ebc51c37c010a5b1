"""Inference: decoding with a paged cache, sampling, and scoring."""
