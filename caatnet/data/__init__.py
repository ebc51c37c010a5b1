"""Datasets and tokenizers."""

from parallel.base.lazy import attach

__all__, __getattr__, __dir__ = attach(__name__, {
  "images": ["ImageData"],
  "protocol": ["Data", "Dataset"],
  "text": ["TextData"],
  "tokenizers": ["Bytes", "LibraryTokenizer", "Tokenizer", "load"],
})
