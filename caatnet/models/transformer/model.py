"""Transformer as a `caatnet.models.protocol.LanguageModel`."""

import dataclasses

import jax

from caatnet.models.lm.model import StackedLanguageModel
from caatnet.models.paged import CacheShape, CacheSizes
from caatnet.models.transformer.config import TransformerConfig
from caatnet.models.transformer.module import Transformer
from parallel.kernels.paged_attention import api


@dataclasses.dataclass(frozen=True)
class TransformerModel(StackedLanguageModel):
  """Transformer language model; an example is T + 1 tokens, int ``[T + 1]``.

  Attributes:
    config: Sizes, and sync policies of the row-parallel projections.
  """

  config: TransformerConfig
  module_type = Transformer

  def cache_shape(self, sizes: CacheSizes) -> CacheShape:
    config = self.config
    heads = -(-config.num_kv_heads // self.tensor.size)  # of a rank, padded
    stored = sizes.dtype or config.dtype
    order = api.best_order(
      sizes.kernels,
      num_heads=heads * config.num_heads // config.num_kv_heads,
      num_kv_heads=heads,
      head_width=config.head_width,
      page_size=sizes.page_size,
      dtype=config.dtype,
      stored=stored,
      window=config.sliding_window,
      finite=True,
    )
    return CacheShape(
      config.num_layers, sizes.num_pages, sizes.page_size, heads,
      config.head_width, stored, order, sizes.kernels,
    )

  def flops(self, example: jax.ShapeDtypeStruct) -> float:
    seq_len = example.shape[-1] - 1  # the last token is a target only
    return seq_len * self.config.flops_per_token(seq_len)
