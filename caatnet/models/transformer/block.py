"""One layer of the transformer: attention and an MLP.

Both are between a column-parallel and a row-parallel projection.

Shape legend: R = lanes (the tensor ranks of one device), B = batch, T =
position, H = width.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from caatnet.models.lm.layers import name_activations, swiglu
from caatnet.models.lm.parameters import (
  Bias,
  ProjectionInitializer,
  Sharded,
  cut_size,
)
from caatnet.models.lm.pieces import Sublayer
from caatnet.models.transformer import layers
from caatnet.models.transformer.config import TransformerConfig
from parallel.axes import Axis
from parallel.tensor.partial_sync import FUSED_ROUTES, PartialSync
from parallel.tensor.projections import (
  column_parallel,
  row_parallel,
  row_products,
)
from parallel.tensor.stream import Stream

# Attention of all lanes: ``(heads, qkv [R, B, T, F], params, state) -> (outputs
# of the heads [R, B, T, f], state)``.
Attend = Callable[
  [layers.AttentionConfig, jax.Array, layers.QkvParams, Any],
  tuple[jax.Array, Any]
]

# `vmap` axes of qkv and `layers.QkvParams`: biases have a dim of lanes, gains
# are shared by all lanes.
QKV_AXES = (0, layers.QkvParams(0, None, None))


class Block(nnx.Module):
  """One layer: attention and MLP, each between parallel projections."""

  def __init__(
    self,
    config: TransformerConfig,
    axis: Axis,
    row_scales: jax.Array,
    rngs: nnx.Rngs,
  ) -> None:
    """Draws the parameters.

    Args:
      config: The sizes.
      axis: The tensor axis.
      row_scales: ``[2, H]``, by which the columns of ``w_out`` and ``w_down``
        are multiplied.
      rngs: The random streams.
    """
    self.config, self.axis = config, axis
    ranks, width = axis.size, config.width
    # Padded heads and padded features of the MLP have zero column and row
    # weights, so their outputs and gradients stay zero. Heads are cut in whole
    # groups: a rank has the query heads that belong to its key/value heads.
    kv_heads = cut_size(config.num_kv_heads, ranks)
    group = config.num_heads // config.num_kv_heads
    self.num_heads, self.num_kv_heads = kv_heads * group, kv_heads
    num_heads, head_width = config.num_heads, config.head_width
    ffn, ffn_cut = config.ffn_width, cut_size(config.ffn_width, ranks)
    self.norm_1 = nnx.Param(jnp.ones(width))
    if config.qk_norm:
      self.query_norm = nnx.Param(jnp.ones(head_width))
      self.key_norm = nnx.Param(jnp.ones(head_width))
    if config.qkv_bias:
      features = (self.num_heads + 2 * kv_heads) * head_width
      self.b_qkv = Bias(jnp.zeros((ranks, features)))
    draw = ProjectionInitializer(config, ranks, rngs)
    heads = (num_heads * head_width, self.num_heads * head_width)
    of_keys = (config.num_kv_heads * head_width, kv_heads * head_width)
    self.w_qkv = Sharded(draw.columns(heads, of_keys, of_keys))
    self.w_out = Sharded(draw.rows(*heads, row_scales[0]))
    self.norm_2 = nnx.Param(jnp.ones(width))
    self.w_gate_up = Sharded(draw.columns((ffn, ffn_cut), (ffn, ffn_cut)))
    self.w_down = Sharded(draw.rows(ffn, ffn_cut, row_scales[1]))

  def __call__(
    self,
    x: Stream,
    state: Any,
    syncs: tuple[PartialSync, PartialSync],
    attend: Attend,
  ) -> tuple[Stream, Any]:
    """Applies attention and MLP to the stream.

    Args:
      x: The stream.
      state: State of attention, carried from layer to layer.
      syncs: Sync policies of the row-parallel projections of attention and MLP.
      attend: Attention of all tensor ranks of this device.

    Returns:
      The stream, to which the MLP's update may still have to be reduced and
      added (`carries`), and the state of attention.
    """
    sync_attention, sync_mlp = syncs
    axis, kernels = self.axis, self.config.kernels
    with jax.named_scope("attention"):
      x, y, state = self._apply_attention(x, state, attend)
      x = x + row_parallel(y, self.w_out[...], axis, sync_attention, kernels)
      # This projection first adds attention's update, and a fused kernel also
      # reduces it, so profiles count the projection as attention.
      x, gate_and_up = self._gate_and_up(x)
    with jax.named_scope("mlp"):
      y = self._gated(gate_and_up)
      x = x + row_parallel(y, self.w_down[...], axis, sync_mlp, kernels)
      carries = self.carries(sync_mlp) and x.is_pending
    return x if carries else x.resolved(), state

  def halves(self, syncs: tuple[PartialSync, PartialSync]) -> tuple[
    Sublayer, Sublayer
  ]:
    """Returns attention and MLP as sublayers, without their all-reduces.

    Args:
      syncs: Sync policies of their row-parallel projections.
    """

    def gated(x, state, attend):
      del attend
      x, gate_and_up = self._gate_and_up(x)
      return x, self._gated(gate_and_up), state

    def rows(w, sync):
      return lambda y: row_products(y, w, self.axis, sync)

    return (
      Sublayer(
        "attention", self._apply_attention, rows(self.w_out[...], syncs[0])
      ),
      Sublayer("mlp", gated, rows(self.w_down[...], syncs[1])),
    )

  def _apply_attention(
    self, x: Stream, state: Any, attend: Attend
  ) -> tuple[Stream, jax.Array, Any]:
    """Returns the stream, the heads' outputs, and the state of attention."""
    config = self.config
    params = layers.QkvParams(
      self.b_qkv[...] if config.qkv_bias else None,
      *(
        [self.query_norm[...], self.key_norm[...]] if config.qk_norm else []
      ),
    )
    x, qkv = column_parallel(
      x, self.norm_1[...], self.w_qkv[...], config.norm_eps, config.kernels
    )
    # [R, B, T, a rank's heads x head width]
    return x, *attend(self.heads, qkv, params, state)

  def _gate_and_up(self, x: Stream) -> tuple[Stream, jax.Array]:
    """Returns the stream, and the MLP's gate and up products side by side."""
    config = self.config
    return column_parallel(
      x, self.norm_2[...], self.w_gate_up[...], config.norm_eps, config.kernels
    )

  def _gated(self, gate_and_up: jax.Array) -> jax.Array:
    """Returns the SwiGLU ``[R, B, T, F]`` of the MLP's gate and up products."""
    # The product is recomputed in the backward, since that is cheaper than to
    # save it; only w_down reads it.
    gated = jax.checkpoint(jax.vmap(swiglu), prevent_cse=False)
    return gated(*name_activations(*jnp.split(gate_and_up, 2, axis=-1)))

  @property
  def heads(self) -> layers.AttentionConfig:
    """Sizes of each rank's attention."""
    config = self.config
    return layers.AttentionConfig(
      self.num_heads, self.num_kv_heads, config.rope_base, config.rope_scaling,
      config.sliding_window, config.norm_eps,
    )

  def carries(self, sync_mlp: PartialSync) -> bool:
    """Returns whether the next layer's norm may do the MLP's all-reduce."""
    return (
      self.config.carry
      and sync_mlp.route in FUSED_ROUTES
      and self.config.kernels != ("reference",)
    )
