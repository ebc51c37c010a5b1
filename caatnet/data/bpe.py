"""Trains a tokenizer: byte-pair encoding of UTF-8 (arXiv 1508.07909).

Words are cut as by GPT-2, whose bytes are characters, so that every text has
tokens and comes back from them as it was.
"""

from collections.abc import Iterable
import json
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# The token between documents, which also ends a text that is generated.
END = "<|endoftext|>"
_SMALLEST = 257


def trained(documents: Iterable[str], vocab_size: int) -> dict[str, str]:
  """Trains a tokenizer; equal documents give equal files.

  Args:
    documents: The texts to train on.
    vocab_size: How many tokens there are: 256 bytes, the one between documents,
      and merged ones, of which a short text may have fewer.

  Returns:
    The files ``tokenizer.json`` and ``tokenizer_config.json`` by their names.

  Raises:
    ValueError: There is no room for all bytes.
  """
  if vocab_size < _SMALLEST:
    raise ValueError(
      f"vocab_size={vocab_size} must be at least {_SMALLEST}: 256 bytes, and "
      "the token between documents"
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
