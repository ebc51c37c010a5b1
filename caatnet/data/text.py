"""Text data: examples are windows of a corpus of tokens."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.data import baselines, encoding, pipeline, sources, tokenizers
from caatnet.data.protocol import Dataset
from caatnet.schema.data import Text

_Losses = Callable[[], dict[str, float]]
_XZ_LABEL = "xz (this text alone)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(Text):
  """Data of a language model: ``config.data`` with the name "text".

  Attributes:
    vocab_size: Vocabulary size of the model (config.model.vocab_size), checked
      against the tokens; None for no check.
    kept: The tokenizer that is stored with a run; None to read the one at
      ``config.data.tokenizer``.
  """

  unit: ClassVar[str] = "tokens"
  vocab_size: int | None = None
  kept: tokenizers.Tokenizer | None = None

  @property
  def example(self) -> jax.ShapeDtypeStruct:
    """Window, int32 ``[T + 1]``: T inputs, and T targets shifted by one."""
    return jax.ShapeDtypeStruct((self.seq_len + 1,), jnp.int32)

  @property
  def units_per_example(self) -> int:
    return self.seq_len

  @property
  def labels(self) -> Mapping[str, str]:
    has_files = self.tokenizer if self.kept is None else self.kept.files
    token = "token" if has_files else "byte"
    return {"loss": f"nats per {token}", "bits_per_byte": "bits per byte"}

  def load(self, seed: int) -> Dataset:
    tokenizer = self.kept or tokenizers.load(self.tokenizer)
    documents = sources.load_documents(
      self.path, self.validation_percent, self.validation_path
    )
    if isinstance(tokenizer, tokenizers.LibraryTokenizer):
      # Checked before encoding, which may take minutes.
      self._check_vocabulary(tokenizer.vocab_size - 1, tokenizer.name)
      found = encoding.encode_corpus(documents, tokenizer)
      corpus = found.corpus
      windows = self._windows(corpus)
      bytes_per_token, losses = self._token_baselines(found, tokenizer)
    else:
      corpus = sources.join_documents(documents)
      largest = max(int(corpus.train.max()), int(corpus.validation.max()))
      self._check_vocabulary(largest, corpus.name)
      windows = self._windows(corpus)
      bytes_per_token, losses = 1.0, lambda: _byte_baselines(corpus, windows)
    measures = functools.partial(text_measures, bytes_per_token=bytes_per_token)
    return Dataset(
      name=corpus.name,
      sha256=corpus.sha256,
      batches=pipeline.train_batches(
        corpus, seq_len=self.seq_len, batch_size=self.batch_size, seed=seed
      ),
      validation=windows,
      measures=measures,
      baselines=lambda: {
        name: measures({"loss": loss}) for name, loss in losses().items()
      },
      tokenizer=tokenizer,
      examples=pipeline.train_examples(corpus, self.seq_len, seed),
    )

  def _check_vocabulary(self, largest: int, name: str) -> None:
    """Raises ValueError if the largest token is not in the vocabulary."""
    if self.vocab_size is not None and self.vocab_size <= largest:
      raise ValueError(
        f"config.model.vocab_size={self.vocab_size} must be above {largest}, "
        f"the largest token of {name}"
      )

  def _windows(self, corpus: sources.Corpus) -> np.ndarray:
    """Returns the validation windows, int32 ``[N, T + 1]``."""
    return pipeline.validation_windows(
      corpus, seq_len=self.seq_len, num_windows=self.validation_windows
    )

  def _token_baselines(
    self, found: encoding.EncodedCorpus, tokenizer: tokenizers.Tokenizer
  ) -> tuple[float, _Losses]:
    """Returns mean bytes per target, and a function that returns baselines.

    The mean converts nats per token to nats per byte. Baselines are losses in
    nats per token, by the model's name.
    """
    corpus = found.corpus
    # Windows of token indices instead of tokens, to look up sizes and text.
    numbers = np.arange(len(corpus.validation), dtype=np.int32)
    places = self._windows(dataclasses.replace(corpus, validation=numbers))
    targets = places[:, 1:]
    bytes_per_token = float(found.sizes[targets].mean())

    def losses() -> dict[str, float]:
      # Bytes of the targets of each window, which xz compresses.
      ends = np.cumsum(found.sizes, dtype=np.int64)
      spans = zip(ends[places[:, 0]], ends[places[:, -1]], strict=True)
      text = np.concatenate([found.text[start:stop] for start, stop in spans])
      bits = baselines.compressed_bits_per_byte(text.tobytes())
      return {
        "unigram": baselines.unigram_loss(
          corpus.train, corpus.validation[places], tokenizer.vocab_size
        ),
        # Bits per byte to nats per token, the unit of all losses here.
        _XZ_LABEL: bits * math.log(2) * bytes_per_token,
      }

    return bytes_per_token, losses


def text_measures(
  means: Mapping[str, float], bytes_per_token: float = 1.0
) -> dict[str, float]:
  """Returns the measures that are reported for text.

  Args:
    means: The mean "loss", in nats per token.
    bytes_per_token: Mean number of text bytes per target.

  Returns:
    "loss" in nats per token, and "bits_per_byte".
  """
  loss = means["loss"]
  bits_per_token = loss / math.log(2)
  return {"loss": loss, "bits_per_byte": bits_per_token / bytes_per_token}


def _byte_baselines(
  corpus: sources.Corpus, windows: np.ndarray
) -> dict[str, float]:
  """Returns losses in nats per byte, by the name of a simple byte model."""
  found = baselines.text_baselines(corpus.train, windows)
  return {"unigram": found.unigram, "bigram": found.bigram, _XZ_LABEL: found.xz}
