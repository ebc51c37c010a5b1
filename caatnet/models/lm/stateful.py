"""Language models with a fixed-size state per sequence.

A layer has a *unit*, which mixes positions, and a gated MLP. Each is between a
column- and a row-parallel projection of the residual stream x:

    x = x + W_out unit(W_in norm(x))
    x = x + W_down swiglu(W_gate_up norm(x))

A model defines its unit and a `StatefulConfig`; all else is here. A unit is a
named tuple of one rank's parameters. Its call ``(y [S, T, F], states, written
bool [S, T]) -> (out [S, T, f], states)`` continues each sequence from its
states. ``written`` is False for padding at the end of a sequence, which leaves
the states unchanged. Its class method ``draw(config, ranks, rngs)`` returns the
initial parameters of all ranks ``[R, ...]``, as variables of
`caatnet.models.lm.parameters`. Channels are cut over tensor ranks by heads, so
a unit is rank-local.

Shape legend: R = lanes (the tensor ranks of one device), B and S = sequences, T
= positions, F = columns of W_in on one rank, f = channels that the unit returns
on one rank, K = width of a convolution, H = width of the stream.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, ClassVar

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models.lm.config import StackConfig, check_divides
from caatnet.models.lm.layers import name_activations, swiglu
from caatnet.models.lm.model import StackedLanguageModel
from caatnet.models.lm.module import LanguageModule
from caatnet.models.lm.parameters import (
  Bias,
  ProjectionInitializer,
  Sharded,
  cut_size,
)
from caatnet.models.paged import Batch, CacheShape, CacheSizes, StateShape
from parallel.axes import Axis
from parallel.collectives import varying, varying_axes
from parallel.tensor.projections import column_parallel, row_parallel
from parallel.tensor.stream import Stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatefulConfig(StackConfig):
  """Sizes of a language model with a fixed-size state.

  Attributes:
    unit: The class of the recurrent unit, which mixes positions in a layer.
    num_heads: Heads of all ranks; a multiple of the number of tensor ranks.
  """

  unit: ClassVar[Any]
  num_heads: int

  @property
  def columns(self) -> tuple[int, ...]:
    """Columns of each matrix of the unit's input projection W_in.

    They are multiples of ``num_heads``.
    """
    raise NotImplementedError

  @property
  def channels(self) -> int:
    """Channels that the recurrent unit returns.

    As many as the first matrix of its input projection W_in has columns.
    """
    return self.columns[0]

  def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
    """Returns the states' shapes for one layer, sequence and rank."""
    raise NotImplementedError

  @functools.cached_property
  def _layer_variables(self) -> list[nnx.Variable]:
    """Parameters of one layer on a single rank, where nothing is padded."""
    layer = nnx.eval_shape(
      lambda: Block(
        self, Axis("tensor", 1), jnp.ones((2, self.width)), nnx.Rngs(0)
      )
    )
    return [x for _, x in nnx.to_flat_state(nnx.state(layer))]

  @property
  def num_product_weights(self) -> int:
    """Number of weights of a layer in matrix products and convolutions."""
    return sum(
      math.prod(x.shape) for x in self._layer_variables
      if isinstance(x, Sharded) and not isinstance(x, Bias)
    )

  @property
  def layer_params(self) -> int:
    return sum(math.prod(x.shape) for x in self._layer_variables)

  @property
  def num_slices(self) -> int:
    return sum(isinstance(x, Sharded) for x in self._layer_variables)


class Block(nnx.Module):
  """One layer: a recurrent unit and an MLP.

  Each is between a column-parallel and a row-parallel projection.
  """

  def __init__(
    self, config: StatefulConfig, axis: Axis, row_scales: jax.Array,
    rngs: nnx.Rngs,
  ) -> None:
    self.config, self.axis = config, axis
    ranks, ffn = axis.size, config.ffn_width
    draw = ProjectionInitializer(config, ranks, rngs)
    self.norm_1, self.norm_2 = (
      nnx.Param(jnp.ones(config.width)) for _ in range(2)
    )
    self.w_in = Sharded(
      draw.columns(*((size, size // ranks) for size in config.columns))
    )
    unit = config.unit.draw(config, ranks, rngs)
    for name, parameter in unit._asdict().items():
      setattr(self, name, parameter)
    channels = config.channels
    self.w_out = Sharded(draw.rows(channels, channels // ranks, row_scales[0]))
    mlp = ffn, cut_size(ffn, ranks)
    self.w_gate_up = Sharded(draw.columns(mlp, mlp))
    self.w_down = Sharded(draw.rows(*mlp, row_scales[1]))

  def __call__(
    self, x: Stream, state: Any, syncs: Any, mix: Any
  ) -> tuple[Stream, Any]:
    """Applies recurrent unit and MLP; see `LanguageModule.block_type`."""
    axis, norm = self.axis, (self.config.norm_eps, self.config.kernels)
    unit = self.config.unit
    unit = unit(*(getattr(self, name)[...] for name in unit._fields))
    with jax.named_scope("recurrence"):
      x, y = column_parallel(x, self.norm_1[...], self.w_in[...], *norm)
      y, state = mix(unit, y, state)
      x = x + row_parallel(y, self.w_out[...], axis, syncs[0], norm[1])
      x, y = column_parallel(x, self.norm_2[...], self.w_gate_up[...], *norm)
    with jax.named_scope("mlp"):
      y = jax.vmap(swiglu)(*name_activations(*jnp.split(y, 2, axis=-1)))
      x = x + row_parallel(y, self.w_down[...], axis, syncs[1], norm[1])
    return x.resolved(), state


class StatefulModule(LanguageModule):
  """Language module with recurrent units.

  Its blocks call ``mix(unit, y, state)`` with the unit's input y, where ``mix``
  is the result of `mixer`.
  """

  block_type = Block

  def mixer(self, batch: Batch | None = None) -> Callable[..., Any]:
    shapes = self.config.state_shapes(self.axis.size)

    def lifted(unit):  # over lanes; the mask of written positions is shared
      return jax.vmap(type(unit).__call__, (0, 0, 0, None))

    def from_zeros(unit, y, state):
      lanes, size, length, _ = y.shape
      zeros = [
        varying(jnp.zeros((lanes, size, *s.shape), s.dtype), *varying_axes(y))
        for s in shapes
      ]
      written = jnp.ones((size, length), bool)
      return lifted(unit)(unit, y, tuple(zeros), written)[0], state

    def from_cache(unit, y, state):
      cache, layer = state
      y, cache = cache.recur(
        layer, y[:, 0], batch, lambda *args: lifted(unit)(unit, *args)
      )
      return y[:, None], (cache, layer + 1)

    return from_zeros if batch is None else from_cache


@dataclasses.dataclass(frozen=True)
class StatefulLanguageModel(StackedLanguageModel):
  """Language model with a fixed-size state per sequence; T + 1 tokens each.

  Attributes:
    config: Sizes of the model and of its states, and sync policies of the
      row-parallel projections.

  Raises:
    ValueError: If the tensor ranks do not divide the heads.
  """

  config: StatefulConfig
  module_type = StatefulModule

  def __post_init__(self) -> None:
    ranks, heads = self.tensor.size, self.config.num_heads
    check_divides(heads, "num_heads", ranks, "parallel.tensor")

  def cache_shape(self, sizes: CacheSizes) -> CacheShape:
    if sizes.dtype:
      raise ValueError(
        f"config.inference.cache={sizes.dtype!r} must be 'float', since states "
        "are not quantised"
      )
    return CacheShape(
      self.config.num_layers, sizes.num_pages, sizes.page_size, 0, 0, "float32",
      "heads", sizes.kernels, self.config.state_shapes(self.tensor.size),
      sizes.num_sequences,
    )

  def flops(self, example: jax.ShapeDtypeStruct) -> float:
    """Returns training FLOPs: 6 per position and weight of a matrix product."""
    config = self.config
    products = config.num_layers * config.num_product_weights
    products += config.vocab_size * config.width
    return 6.0 * products * (example.shape[-1] - 1)


def causal_convolution(
  x: jax.Array, window: jax.Array, taps: jax.Array, bias: jax.Array,
  written: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Convolves each channel over the last K positions.

  Args:
    x: ``[S, T, f]``.
    window: The K - 1 inputs before x, ``[S, K - 1, f]``.
    taps: ``[K, f]``; the last row multiplies the input of the same position.
    bias: ``[f]``.
    written: bool ``[S, T]``; False for padding at the end of a sequence.

  Returns:
    The result in the shape and dtype of x, and the window after the last
    written position, float32 ``[S, K - 1, f]``.
  """
  size, length, dtype = taps.shape[0], x.shape[1], x.dtype
  inputs = jnp.concatenate([window.astype(dtype), x], axis=1)
  taps = taps.astype(dtype)[:, None, None]  # [K, 1, 1, f]
  # Position t reads inputs t - K + 1 to t.
  y = bias.astype(dtype)[None, None] + sum(
    inputs[:, k : k + length] * taps[k] for k in range(size)
  )
  # The K - 1 inputs that precede the first unwritten position.
  window = jax.vmap(
    lambda x, n: lax.dynamic_slice_in_dim(x, n, size - 1)
  )(inputs, written.sum(axis=1, dtype=jnp.int32))
  return y, window.astype(jnp.float32)


def linear_recurrence(
  a: jax.Array, b: jax.Array, h: jax.Array, written: jax.Array
) -> jax.Array:
  """Computes ``h_t = a_t h_{t-1} + b_t`` by an associative scan.

  Args:
    a: float32 ``[S, T, ...]``.
    b: float32 ``[S, T, ...]``.
    h: The state before the first position, float32 ``[S, ...]``.
    written: bool ``[S, T]``; False for padding, which leaves h unchanged.

  Returns:
    h at all positions, float32 ``[S, T, ...]``.
  """
  written = jnp.expand_dims(written, range(2, a.ndim))
  a, b = jnp.where(written, a, 1.0), jnp.where(written, b, 0.0)
  # h_0 = a_0 h + b_0, so the initial state is folded into b_0.
  b = b.at[:, 0].add(a[:, 0] * h)
  # (a, b) stands for h -> a h + b; the operator composes two such maps.
  _, all_h = lax.associative_scan(
    lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=1
  )
  return all_h
