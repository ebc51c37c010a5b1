"""Matrix products and norms of projections, in the fastest form per platform.

XLA:CPU runs some forms of a product at a fraction of the rate of others.
`parallel.tensor.projections` therefore calls the functions of this module,
which select a form by the platform and compute the same result in each.

Shape legend: R = lanes (ranks on this device), B = batch, T = position, H =
width (stream channels), F = features of one rank.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

from parallel.collectives import on_cpu
from parallel.kernels.add_norm import api as kernels
from parallel.kernels.add_norm.reference import sum_of_squares
from parallel.kernels.calls import unify_varying_axes
from parallel.kernels.coded import CodedMatrix
from parallel.kernels.selection import Implementation

# No product here has a dim of size 1 next to the contracted dim, and a product
# has a batch dim only for several lanes: XLA:CPU runs other products at a
# fraction of the rate of a plain matrix product (docs/methods.md).


def product(x: jax.Array, w: jax.Array | CodedMatrix) -> jax.Array:
  """Multiplies x ``[B, T, H]`` by the single matrix in w ``[1, H, F]``."""
  if isinstance(w, CodedMatrix):
    return w.product(x)
  # On CPUs the backward of `product_per_rank` avoids a copy in the weights'
  # gradient.
  return product_per_rank(x[None], w)[0] if on_cpu() else x @ w[0]


def product_per_rank(x: jax.Array, w: jax.Array) -> jax.Array:
  """Multiplies the activations of each rank on this device by its matrix.

  The backward is written by hand, for two reasons. Autodiff would save each
  rank's slices of x and w in addition to x and w. It would also compute the
  weights' gradient transposed, for which XLA:CPU copies an operand.

  Args:
    x: Activations of the R ranks, ``[R, B, T, H]``.
    w: Their matrices, ``[R, H, F]``.

  Returns:
    ``[R, B, T, F]``.
  """

  # XLA:CPU (jaxlib 0.10) converts the operands of a bfloat16 product to float32
  # unless its result is float32, which takes twice as long.
  wide = jnp.float32 if on_cpu() else None

  @jax.custom_vjp
  def products(x, w):
    return by_lane(matmul, x, w)

  def forward(x, w):
    return products(x, w), (x, w)

  def backward(residuals, cotangent):
    x, w = residuals
    dx = by_lane(lambda a, b: matmul(a, b.T), cotangent, w)
    return dx, by_lane(over_tokens, x, cotangent)

  def matmul(a, b):
    return jnp.matmul(a, b, preferred_element_type=wide).astype(a.dtype)

  def by_lane(f, *operands):
    if w.shape[0] > 1:
      return jax.vmap(f)(*operands)
    return f(*(x[0] for x in operands))[None]

  def over_tokens(a, b):
    # Merges B and T: XLA:CPU copies operands to contract two dims. H or F may
    # be 0, so the merged size cannot be -1.
    a, b = (x.reshape(x.shape[0] * x.shape[1], x.shape[2]) for x in (a, b))
    return matmul(a.T, b)

  products.defvjp(forward, backward)
  return products(*unify_varying_axes(x, w))


def scales_streams(features: int, width: int) -> bool:
  """Returns whether a norm scales the ranks' streams, not their products.

  On CPUs the smaller of the two arrays is scaled. If that is the stream, one
  product covers all channels, and nothing is added or scaled after it.

  Args:
    features: Features of one rank's product, F.
    width: Channels of the stream, H.
  """
  return on_cpu() and features > width


def add_norm(
  shared: jax.Array, private: jax.Array, d_shared: jax.Array | None,
  d_private: jax.Array | None, gain: jax.Array, eps: float,
  implementation: Implementation = "reference",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds an update to a stream and normalises it (RMSNorm).

  Arguments and results are as for `parallel.kernels.add_norm.api.add_norm`. On
  CPUs without a kernel it uses `multiply`, which saves less for the backward.
  """
  chosen = kernels.select_kernel(shared, private, implementation)
  if not (on_cpu() and chosen.name == "reference"):
    return kernels.add_norm(
      shared, private, d_shared, d_private, gain, eps=eps,
      implementation=implementation,
    )
  if d_shared is not None:
    shared, private = shared + d_shared, private + d_private
  both = jnp.concatenate([shared, private], axis=-1)
  wide = both.astype(jnp.float32)
  squares = sum_of_squares(shared) + sum_of_squares(private)
  rstd = lax.rsqrt(squares / both.shape[-1] + eps)[..., None]
  normed = multiply(wide, rstd) * jnp.expand_dims(gain, range(both.ndim - 1))
  return shared, private, normed.astype(both.dtype)


def multiply(y: jax.Array, factor: jax.Array) -> jax.Array:
  """Returns ``y * factor`` in y's dtype; the factor is ``[..., 1]``.

  Autodiff would save y for the factor's cotangent. This backward divides the
  product by the factor instead: the product is saved by its consumers anyway.
  """

  @jax.custom_vjp
  def times(y, factor):
    return (y.astype(factor.dtype) * factor).astype(y.dtype)

  def forward(y, factor):
    product = times(y, factor)
    return product, (product, factor)

  def backward(residuals, cotangent):
    product, factor = residuals
    wide = cotangent.astype(factor.dtype)
    d_factor = _row_sums(wide * product.astype(factor.dtype)) / factor
    return (wide * factor).astype(product.dtype), d_factor

  times.defvjp(forward, backward)
  return times(*unify_varying_axes(y, factor))


def _row_sums(x: jax.Array) -> jax.Array:
  """Sums the last dim of ``[..., n]`` to ``[..., 1]``."""
  if not on_cpu():
    return jnp.sum(x, axis=-1, keepdims=True)
  # XLA:CPU fuses a sum with the computation of its operand, which is slower
  # than a product: log/2026-11-28-training-step-memory.md.
  rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  return (rows @ jnp.ones((x.shape[-1], 1), x.dtype)).reshape(*x.shape[:-1], 1)
