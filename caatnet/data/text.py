"""Text as bytes: windows of a corpus are the examples."""

from collections.abc import Mapping
import dataclasses
import math

import jax
import jax.numpy as jnp

from caatnet.data import pipeline, sources
from caatnet.data.baselines import text_baselines
from caatnet.data.protocol import Dataset


@dataclasses.dataclass(frozen=True)
class TextData:
  """The data of a language model: ``config.data`` with the name "text".

  A token is a byte.

  Attributes:
    path: A .txt or .jsonl file or a folder of them; "" for the source of
      Python's standard library.
    seq_len: Tokens per sequence.
    batch_size: Sequences per step, over all workers and data-parallel ranks.
    validation_percent: The expected share of the documents that is held out.
    validation_path: A file or folder like ``path`` to validate on, in place of
      a share of the documents; "" for none.
    validation_windows: How many windows every evaluation reads; 0 for all.
    vocab_size: How many tokens the model has that reads the text, a key of its
      section and not of this one; None for any number.
  """

  path: str
  seq_len: int
  batch_size: int
  validation_percent: float
  validation_path: str
  validation_windows: int
  vocab_size: int | None = None

  @property
  def example(self) -> jax.ShapeDtypeStruct:
    """A window, int32 ``[T + 1]``: T inputs, and the T targets after them."""
    return jax.ShapeDtypeStruct((self.seq_len + 1,), jnp.int32)

  @property
  def unit(self) -> str:
    return "tokens"

  @property
  def units_per_example(self) -> int:
    return self.seq_len

  @property
  def labels(self) -> Mapping[str, str]:
    return {"loss": "nats per byte", "bits_per_byte": "bits per byte"}

  def measures(self, means: Mapping[str, float]) -> dict[str, float]:
    loss = means["loss"]
    return {"loss": loss, "bits_per_byte": loss / math.log(2)}

  def load(self, seed: int) -> Dataset:
    corpus = sources.load_corpus(
      self.path, self.validation_percent, self.validation_path
    )
    largest = max(int(corpus.train.max()), int(corpus.validation.max()))
    if self.vocab_size is not None and self.vocab_size <= largest:
      raise ValueError(
        f"config.model.vocab_size={self.vocab_size} must be above {largest}, "
        f"the largest token of {corpus.name}"
      )
    windows = pipeline.validation_windows(
      corpus, seq_len=self.seq_len, num_windows=self.validation_windows
    )

    def baselines() -> dict[str, dict[str, float]]:
      found = text_baselines(corpus.train, windows)
      losses = {
        "unigram": found.unigram,
        "bigram": found.bigram,
        "xz (this text alone)": found.xz,
      }
      return {k: self.measures({"loss": v}) for k, v in losses.items()}

    return Dataset(
      name=corpus.name,
      sha256=corpus.sha256,
      batches=pipeline.train_batches(
        corpus, seq_len=self.seq_len, batch_size=self.batch_size, seed=seed
      ),
      validation=windows,
      baselines=baselines,
    )
