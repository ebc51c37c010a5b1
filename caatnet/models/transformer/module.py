"""Llama-style transformer under partially synchronised tensor parallelism.

Layers have RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Source: Touvron et al., arXiv 2302.13971.

Shape legend: R = lanes (the tensor ranks of one device), B = batch, T =
position, F = features of one rank.
"""

import functools
from typing import Any

from flax import nnx
import jax

from caatnet.models.lm.module import LanguageModule
from caatnet.models.lm.parameters import check_padding
from caatnet.models.lm.stack import SyncPolicies
from caatnet.models.paged import Batch
from caatnet.models.transformer import layers
from caatnet.models.transformer.block import QKV_AXES, Attend, Block
from caatnet.models.transformer.config import TransformerConfig
from parallel.axes import Axis


class Transformer(LanguageModule):
  """Language module whose blocks have attention."""

  block_type = Block

  def __init__(
    self, config: TransformerConfig, axis: Axis, rngs: nnx.Rngs
  ) -> None:
    """Draws the parameters of all ranks.

    Args:
      config: The sizes.
      axis: The tensor axis.
      rngs: The random streams.

    Raises:
      ValueError: If padding would double the number of heads, features or
        tokens.
    """
    check_padding(config.num_kv_heads, "num_kv_heads", axis.size)
    super().__init__(config, axis, rngs)

  def mixer(self, batch: Batch | None = None) -> Attend:
    if batch is None:
      return self._attend_to_all
    return self._attend_to_cache(batch)

  def carries(self, syncs: SyncPolicies) -> bool:
    return self.blocks.carries(syncs[1])

  def _attend_to_cache(self, batch: Batch) -> Attend:
    """Returns a function that attends to a step's sequences in the cache."""

    def attend(heads, qkv, params, state):
      cache, layer = state
      q, k, v = jax.vmap(
        lambda qkv, params: layers.split_heads(
          qkv, heads, params, batch.positions[None]
        ),
        in_axes=QKV_AXES,
      )(qkv, params)
      cache = cache.write(layer, k[:, 0], v[:, 0], batch)
      y = cache.attend(layer, q[:, 0], batch, heads.window)
      return y.reshape(*qkv.shape[:-1], -1), (cache, layer + 1)

    return attend

  def _attend_to_all(
    self,
    heads: layers.AttentionConfig,
    qkv: jax.Array,
    params: layers.QkvParams,
    state: Any,
  ) -> tuple[jax.Array, Any]:
    """Computes causal attention over whole sequences, without a cache."""
    attend = jax.vmap(
      functools.partial(
        layers.attend, heads=heads, implementation=self.config.attention
      ),
      in_axes=QKV_AXES,
    )
    return attend(qkv, params), state
