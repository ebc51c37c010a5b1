"""Interoperability with Hugging Face checkpoints and lm-evaluation-harness."""
