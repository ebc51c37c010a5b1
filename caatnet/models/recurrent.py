"""Gated linear recurrence: a language model with a fixed-size state.

Source: Hawk of De et al., "Griffin: Mixing Gated Linear Recurrences with Local
Attention", arXiv 2402.19427. The unit of a layer multiplies two branches of the
normalised stream x, and W_out projects the product to the stream:

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

Shape legend: R = ranks, S = sequences, T = positions, N = heads of a rank, D =
channels of a head, F = N D, K = width of the convolution.
"""

import dataclasses
import math
from typing import NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from caatnet.models.lm.config import check_divides
from caatnet.models.lm.layers import name_activations
from caatnet.models.lm.parameters import Bias, Float32Bias, Sharded, cut_columns
from caatnet.models.lm.stateful import (
  StatefulConfig,
  StatefulLanguageModel,
  causal_convolution,
  linear_recurrence,
)
from caatnet.models.paged import StateShape

_DECAY_SCALE = 8.0


class Unit(NamedTuple):
  """Recurrent unit with the parameters of one rank.

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

  @classmethod
  def draw(
    cls, config: "RecurrentConfig", ranks: int, rngs: nnx.Rngs
  ) -> "Unit":
    """Draws initial parameters of all ranks, variables ``[R, ...]``."""
    channels, cut = config.rnn_width, config.rnn_width // ranks
    d = channels // config.num_heads
    taps = jax.random.normal(rngs.params(), (config.conv_width, channels))
    gates = jax.random.normal(rngs.params(), (config.num_heads, d, 2 * d))
    # a_t at r_t = 1 (the paper's a^c) is uniform in [0.9, 0.999].
    a = jax.random.uniform(rngs.params(), (channels,), minval=0.9, maxval=0.999)
    return cls(
      Sharded(cut_columns(taps / math.sqrt(config.conv_width), ranks, cut)),
      Bias(jnp.zeros((ranks, cut))),
      Sharded(gates.reshape(ranks, -1, d, 2 * d) / math.sqrt(d)),
      Float32Bias(jnp.zeros((ranks, 2 * cut))),
      Float32Bias(
        jnp.log(jnp.expm1(-jnp.log(a) / _DECAY_SCALE)).reshape(ranks, cut)
      ),
    )

  def __call__(
    self, y: jax.Array, states: tuple[jax.Array, jax.Array], written: jax.Array
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs the recurrence over sequences.

    Args:
      y: ``[S, T, 2 F]``, the products W_g x and W_u x.
      states: The last inputs of the convolution ``[S, K - 1, F]`` and h ``[S,
        F]``, both float32.
      written: bool ``[S, T]``; False for padding.

    Returns:
      ``gelu(W_g x) h`` ``[S, T, F]``, and the states after the last written
      position.
    """
    window, h = states
    gate, u = name_activations(*jnp.split(y, 2, axis=-1))
    u, window = causal_convolution(
      u, window, self.conv, self.conv_bias, written
    )
    heads = u.reshape(*u.shape[:2], *self.gates.shape[:2])
    gates = jnp.einsum("stnd,nde->stne", heads, self.gates.astype(y.dtype))
    bias = self.gates_bias.reshape(1, 1, *gates.shape[2:])
    gates = jax.nn.sigmoid(gates.astype(jnp.float32) + bias)
    r, i = (x.reshape(u.shape) for x in jnp.split(gates, 2, axis=-1))
    # Equations 3, 4 and 6. With expm1, 1 - a_t^2 is exact for a_t close to 1.
    log_a = -_DECAY_SCALE * r * jax.nn.softplus(self.rate)[None, None]
    b = jnp.sqrt(-jnp.expm1(2 * log_a)) * i * u
    all_h = linear_recurrence(jnp.exp(log_a), b, h, written)
    out = jax.nn.gelu(gate) * all_h.astype(y.dtype)
    return out, (window, all_h[:, -1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(StatefulConfig):
  """Sizes of a recurrent language model.

  Attributes:
    rnn_width: Channels of the recurrence; a multiple of ``num_heads``.
    conv_width: K, the width of the causal convolution, at least 2.
  """

  unit = Unit
  rnn_width: int
  conv_width: int

  def __post_init__(self) -> None:
    super().__post_init__()
    heads = self.num_heads
    check_divides(self.rnn_width, "rnn_width", heads, "model.num_heads")

  @property
  def columns(self) -> tuple[int, ...]:
    return self.rnn_width, self.rnn_width

  def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
    """Returns the shapes of a rank's states: convolution inputs, and h."""
    channels = self.rnn_width // ranks
    return StateShape((self.conv_width - 1, channels)), StateShape((channels,))


@dataclasses.dataclass(frozen=True)
class RecurrentModel(StatefulLanguageModel):
  """Recurrent language model; an example is T + 1 tokens, int ``[T + 1]``."""

  config: RecurrentConfig
