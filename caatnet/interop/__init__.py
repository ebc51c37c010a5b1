"""Interoperability with Hugging Face checkpoints and lm-evaluation-harness."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "harness": ["evaluate"],
  "huggingface": ["write_published", "write_run"],
  "source": ["open_source"],
})
