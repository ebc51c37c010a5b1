"""Training of byte-level byte-pair encoding tokenizers (arXiv 1508.07909).

Pre-tokenisation and byte alphabet are GPT-2's, so that every text can be
encoded and is decoded exactly.
"""

from collections.abc import Iterable
import json
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The token between documents, which also ends generated text.
END = "<|endoftext|>"
_MIN_VOCAB_SIZE = 257


def train_tokenizer(
  documents: Iterable[str], vocab_size: int
) -> dict[str, str]:
  """Trains a tokenizer; equal documents give equal files.

  Args:
    documents: The texts to train on.
    vocab_size: Number of tokens: 256 bytes, the token between documents, and
      merges. A short text may give fewer merges.

  Returns:
    The contents of ``tokenizer.json`` and ``tokenizer_config.json`` by name.

  Raises:
    ValueError: If ``vocab_size`` is less than 257.
  """
  if vocab_size < _MIN_VOCAB_SIZE:
    raise ValueError(
      f"vocab_size={vocab_size} must be at least {_MIN_VOCAB_SIZE}: 256 bytes "
      "and "
      "one token between documents"
    )
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    min_frequency=2,
    special_tokens=[END],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=sys.stderr.isatty(),
  )
  tokenizer.train_from_iterator(documents, trainer)
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
  }
  return {
    "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
    "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
  }
