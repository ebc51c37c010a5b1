"""The keys of ``config.inference``."""

import dataclasses

from caatnet.checks import DTYPES, one_of

STORED = ("float", "int8")


@dataclasses.dataclass(frozen=True)
class InferenceOptions:
  """How a language model continues text; ``configs/sections.py`` explains.

  Attributes:
    batch: Sequences at a time in each replica.
    context: The positions of a sequence.
    page_size: The positions of a page of the cache.
    pages: The pages of a replica's cache; 0 for what the batch can fill.
    chunk: Tokens of a prompt that one step reads.
    dtype: The dtype of weights and activations; "" for the model's.
    weights: How matrices are kept, one of ``STORED``.
    cache: How keys and values are kept, one of ``STORED``.
  """

  batch: int
  context: int
  page_size: int
  pages: int
  chunk: int
  dtype: str
  weights: str
  cache: str

  def __post_init__(self) -> None:
    if self.dtype:
      one_of("dtype", self.dtype, DTYPES)
    one_of("weights", self.weights, STORED)
    one_of("cache", self.cache, STORED)
    if 0 < self.pages * self.page_size < self.context:
      raise ValueError(
        f"context={self.context} is longer than the cache: pages={self.pages} "
        f"of page_size={self.page_size} hold {self.pages * self.page_size} "
        "positions"
      )


DEFAULTS = InferenceOptions(16, 1024, 64, 0, 256, "", "float", "float")
