"""Gated linear recurrence: a language model with a fixed-size state.

Source: Hawk of De et al., "Griffin: Mixing Gated Linear Recurrences with Local
Attention", arXiv 2402.19427. A layer has a recurrent block and a gated MLP. The
block multiplies two branches of the normalised stream x and projects the
product to the stream:

    u_t = convolution of W_u x over the last K positions, channel by channel
    r_t = sigmoid(W_r u_t + b_r)               recurrence gate, equation 1
    i_t = sigmoid(W_i u_t + b_i)               input gate, equation 2
    log a_t = -c r_t softplus(rate),  c = 8    equations 3 and 6
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t)                 equation 4
    update = W_out (gelu(W_g x) h)

W_r and W_i are block-diagonal, with one block per head. The recurrence is
computed by an associative scan in float32. Heads are cut over tensor ranks, so
everything between the column- and the row-parallel projection is rank-local.
Deviations: the MLP is SwiGLU instead of GeGLU, and embeddings are not scaled.

Shape legend: R = lanes (ranks outside shard_map), S = sequences, T = positions,
N = heads of a rank, D = channels of a head, F = N D, K = width of the
convolution, H = width of the stream.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from caatnet.models.lm.config import StackConfig, check_divides
from caatnet.models.lm.layers import kept, swiglu
from caatnet.models.lm.parameters import (
  Bias,
  Drawing,
  Sharded,
  Wide,
  cut_columns,
  cut_size,
)
from caatnet.models.lm.stateful import StatefulLanguageModel, StatefulModule
from caatnet.models.paged import StateShape
from parallel.axes import Axis
from parallel.tensor.projections import column_parallel, row_parallel
from parallel.tensor.stream import Stream

_C = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(StackConfig):
  """Sizes of the model.

  Attributes:
    num_heads: Heads of all ranks; a multiple of the number of tensor ranks.
    rnn_width: Channels of the recurrence; a multiple of ``num_heads``.
    conv_width: K, the width of the causal convolution, at least 2.
  """

  num_heads: int
  rnn_width: int
  conv_width: int

  def __post_init__(self) -> None:
    super().__post_init__()
    heads = self.num_heads
    check_divides(self.rnn_width, "rnn_width", heads, "model.num_heads")

  @property
  def layer_products(self) -> int:
    """Number of weights of a layer in matrix products and convolutions."""
    gates = 2 * self.rnn_width * self.rnn_width // self.num_heads
    block = (3 * self.width + self.conv_width) * self.rnn_width + gates
    return block + 3 * self.width * self.ffn_width

  @property
  def layer_params(self) -> int:
    # Biases of convolution and gates, and rates; two gains.
    return self.layer_products + 4 * self.rnn_width + 2 * self.width

  @property
  def num_slices(self) -> int:
    return 9

  def state_shapes(self, ranks: int) -> tuple[StateShape, StateShape]:
    """Returns one rank's states: last inputs of the convolution, and h."""
    channels = self.rnn_width // ranks
    return StateShape((self.conv_width - 1, channels)), StateShape((channels,))


class Unit(NamedTuple):
  """Parameters of one rank's recurrence.

  Attributes:
    conv: ``[K, F]``; the last row multiplies the input of the same position.
    conv_bias: ``[F]``.
    gates: ``[N, D, 2 D]``, the weights W_r and W_i.
    gates_bias: float32 ``[N 2 D]``, the biases b_r and b_i.
    rate: float32 ``[F]``, the parameter of a_t before softplus.
  """

  conv: jax.Array
  conv_bias: jax.Array
  gates: jax.Array
  gates_bias: jax.Array
  rate: jax.Array

  def __call__(
    self, y: jax.Array, states: tuple[jax.Array, jax.Array], written: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs the recurrence over sequences.

    Args:
      y: ``[S, T, 2 F]``, the products W_g x and W_u x.
      states: The last inputs of the convolution ``[S, K - 1, F]`` and h ``[S,
        F]``, both float32.
      written: bool ``[S, T]``; False for padding at the end of a sequence,
        which leaves the states unchanged.

    Returns:
      ``gelu(W_g x) h`` ``[S, T, F]``, and the states after the last written
      position.
    """
    window, h = states
    size, length, dtype = self.conv.shape[0], y.shape[1], y.dtype
    gate, u = kept(*jnp.split(y, 2, axis=-1))
    inputs = jnp.concatenate([window.astype(dtype), u], axis=1)
    taps = self.conv.astype(dtype)[:, None, None]  # [K, 1, 1, F]
    # [S, T, F]: position t reads inputs t - K + 1 to t.
    u = self.conv_bias.astype(dtype)[None, None] + sum(
      inputs[:, k : k + length] * taps[k] for k in range(size)
    )
    heads = u.reshape(*u.shape[:2], *self.gates.shape[:2])
    gates = jnp.einsum("stnd,nde->stne", heads, self.gates.astype(dtype))
    bias = self.gates_bias.reshape(1, 1, *gates.shape[2:])
    gates = jax.nn.sigmoid(gates.astype(jnp.float32) + bias)
    r, i = (x.reshape(u.shape) for x in jnp.split(gates, 2, axis=-1))
    # Equations 3, 4 and 6; expm1 is exact where a is close to 1.
    log_a = -_C * r * jax.nn.softplus(self.rate)[None, None]
    b = jnp.sqrt(-jnp.expm1(2 * log_a)) * i * u
    a = jnp.where(written[..., None], jnp.exp(log_a), 1.0)
    b = jnp.where(written[..., None], b, 0.0)
    # h_0 = a_0 h + b_0, so the initial state is folded into b_0.
    b = b.at[:, 0].add(a[:, 0] * h)
    # (a, b) stands for h -> a h + b; the operator composes two such maps.
    _, all_h = lax.associative_scan(
      lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=1
    )
    # The K - 1 inputs that precede the first unwritten position.
    window = jax.vmap(
      lambda x, n: lax.dynamic_slice_in_dim(x, n, size - 1)
    )(inputs, written.sum(axis=1, dtype=jnp.int32))
    out = jax.nn.gelu(gate) * all_h.astype(dtype)
    return out, (window.astype(jnp.float32), all_h[:, -1])


class Block(nnx.Module):
  """One layer: a recurrence and an MLP, each between parallel projections."""

  def __init__(
    self, config: RecurrentConfig, axis: Axis, row_scales: jax.Array,
    rngs: nnx.Rngs,
  ) -> None:
    self.config, self.axis = config, axis
    ranks, width, channels = axis.size, config.width, config.rnn_width
    cut, ffn = channels // ranks, cut_size(config.ffn_width, ranks)
    draw = Drawing(config, ranks, rngs)
    d = channels // config.num_heads
    heads = (ranks, config.num_heads // ranks)
    self.norm_1, self.norm_2 = (nnx.Param(jnp.ones(width)) for _ in range(2))
    self.w_in = Sharded(draw.columns((channels, cut), (channels, cut)))
    taps = jax.random.normal(rngs.params(), (config.conv_width, channels))
    self.conv = Sharded(
      cut_columns(taps / math.sqrt(config.conv_width), ranks, cut)
    )
    self.conv_bias = Bias(jnp.zeros((ranks, cut)))
    gates = jax.random.normal(rngs.params(), (config.num_heads, d, 2 * d))
    self.gates = Sharded(gates.reshape(*heads, d, 2 * d) / math.sqrt(d))
    self.gates_bias = Wide(jnp.zeros((ranks, 2 * cut)))
    # a^c at r = 1 is uniform in [0.9, 0.999], as in the paper.
    a = jax.random.uniform(rngs.params(), (channels,), minval=0.9, maxval=0.999)
    self.rate = Wide(jnp.log(jnp.expm1(-jnp.log(a) / _C)).reshape(ranks, cut))
    self.w_out = Sharded(draw.rows(channels, cut, row_scales[0]))
    mlp = config.ffn_width, ffn
    self.w_gate_up = Sharded(draw.columns(mlp, mlp))
    self.w_down = Sharded(draw.rows(*mlp, row_scales[1]))

  def __call__(
    self, x: Stream, state: Any, syncs: Any, mix: Any
  ) -> tuple[Stream, Any]:
    """Applies recurrence and MLP; see `LanguageModule.block_type`."""
    axis, norm = self.axis, (self.config.norm_eps, self.config.kernels)
    unit = Unit(*(getattr(self, name)[...] for name in Unit._fields))
    with jax.named_scope("recurrence"):
      x, y = column_parallel(x, self.norm_1[...], self.w_in[...], *norm)
      y, state = mix(unit, y, state)
      x = x + row_parallel(y, self.w_out[...], axis, syncs[0], norm[1])
      x, y = column_parallel(x, self.norm_2[...], self.w_gate_up[...], *norm)
    with jax.named_scope("mlp"):
      y = jax.vmap(swiglu)(*kept(*jnp.split(y, 2, axis=-1)))
      x = x + row_parallel(y, self.w_down[...], axis, syncs[1], norm[1])
    return x.resolved(), state


class Recurrent(StatefulModule):
  """Language module whose blocks are gated linear recurrences."""

  block_type = Block


@dataclasses.dataclass(frozen=True)
class RecurrentModel(StatefulLanguageModel):
  """Recurrent language model; an example is int ``[T + 1]``.

  Attributes:
    config: Sizes, and sync policies of the row-parallel projections.

  Raises:
    ValueError: If the tensor ranks do not divide the heads.
  """

  config: RecurrentConfig
  module_type = Recurrent

  def __post_init__(self) -> None:
    ranks, heads = self.tensor.size, self.config.num_heads
    check_divides(heads, "num_heads", ranks, "parallel.tensor")

  def flops(self, example: jax.ShapeDtypeStruct) -> float:
    """Returns six FLOPs per weight in a matrix product and position."""
    config = self.config
    products = config.num_layers * config.layer_products
    products += config.vocab_size * config.width
    return 6.0 * products * (example.shape[-1] - 1)
