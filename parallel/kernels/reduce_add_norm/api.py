"""Sum over ranks, residual add and RMSNorm, by the preferred implementation.

Shape legend: r = ranks, K = shared channels, P = private channels, H = K + P.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.add_norm.reference import NormOptions
from parallel.kernels.reduce_add_norm import gpu, reference, tpu
from parallel.kernels.selection import Implementation, SelectedKernel, choose


class Kernels(Protocol):
  """Kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``.

  There is no separate backward kernel: the cotangent of a sum is the cotangent
  of each summand, so that `add_norm.Kernels.backward` suffices.
  """

  def refusal(
    self, num_rows: int, shared: int, private: int, dtype: jnp.dtype,
    ranks: int, sent: jnp.dtype, block: int | None,
  ) -> str | None:
    """Returns the reason why operands are not supported, or None if they are.

    The operands must also be supported by the kernels of `add_norm`.

    Args:
      num_rows: Number of rows (tokens) of the stream, n.
      shared: Shared channels per row, K.
      private: Private channels per row, P.
      dtype: Dtype of the stream.
      ranks: Number of partial sums that are added, r.
      sent: Dtype of the partial sums.
      block: Channels per scale; None if the partial sums are not encoded.
    """
    ...

  def forward(
    self, parts: Sequence[jax.Array], partial: jax.Array,
    scales: jax.Array | None, d_private: jax.Array | None, gain: jax.Array,
    options: NormOptions,
  ) -> tuple[list[jax.Array], jax.Array]:
    """Adds the ranks' partial sums to the residual stream and normalises it.

    Args:
      parts: Shared channels of the stream ``[n, K]`` and, if there are any, its
        private channels ``[n, P]``.
      partial: Every rank's partial sum of the shared channels' update,
        ``[r, n, K]``.
      scales: float32 ``[r, n, K / block]``; None if ``partial`` is not encoded.
      d_private: Update of the private channels, ``[n, P]``; None if there are
        none.
      gain: Gain of the norm, float32 ``[H]``.
      options: Options of the norm; the scale is the factor of ``d_private``.

    Returns:
      The new parts of the stream, and the normalised rows ``[n, H]``.
    """
    ...


KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


def select_kernel(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  scales: jax.Array | None,
  implementation: Implementation = "auto",
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the operands.

  Only shapes and dtypes of the arrays are used, so that each may be a
  ``jax.ShapeDtypeStruct``.

  Args:
    shared: Shared channels of the stream, ``[..., K]``.
    private: Private channels, ``[..., P]``.
    partial: Every rank's partial sum, ``[r, ..., K]``.
    scales: Scales of encoded partial sums, ``[r, ..., K / block]``, or None.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  rows, k, p = calls.leading_size(shared), shared.shape[-1], private.shape[-1]
  block = None
  if scales is not None:
    block = k // scales.shape[-1]

  def refusal(kind):
    return KERNELS[kind].refusal(
      rows, k, p, shared.dtype, partial.shape[0], partial.dtype, block
    ) or add_norm.KERNELS[kind].refusal(rows, k + p, shared.dtype)

  return choose("reduce_add_norm", implementation, refusal)


def reduce_add_norm(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  scales: jax.Array | None,
  d_private: jax.Array,
  gain: jax.Array,
  *,
  private_scale: float = 1.0,
  eps: float = 1e-5,
  implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds the ranks' partial sums to the residual stream and normalises it.

  ``reference.reduce_add_norm`` specifies the result. Kernels use one pass over
  memory.

  Args:
    shared: Shared channels of the stream (equal on all tensor ranks),
      ``[..., K]``.
    private: Private channels (different on each rank), ``[..., P]``, of the
      same dtype; P may be 0.
    partial: Every rank's partial sum of the shared channels' update,
      ``[r, ..., K]``; int8 codes if there are scales.
    scales: float32 ``[r, ..., K / block]``; None if ``partial`` is not encoded.
      Encoded partial sums are treated as constants by differentiation.
    d_private: Update of the private channels, ``[..., P]``.
    gain: Gain of the norm, float32 ``[H]``.
    private_scale: Factor of ``d_private``.
    eps: Constant added to the mean square.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Returns:
    The new shared channels ``[..., K]``, the new private channels ``[..., P]``
    and the normalised row ``[..., H]``.

  Raises:
    ValueError: The number of scales does not divide K, a name is unknown, or no
      preferred implementation supports the operands.
  """
  if scales is not None and shared.shape[-1] % scales.shape[-1]:
    raise ValueError(
      f"{scales.shape[-1]} scales cannot cover {shared.shape[-1]} shared "
      "channels in blocks of equal size; the number of scales must divide the "
      "number of shared channels"
    )
  chosen = select_kernel(shared, private, partial, scales, implementation)
  if chosen.name == "reference":
    return reference.reduce_add_norm(
      shared, private, partial, scales, d_private, gain,
      private_scale=private_scale, eps=eps,
    )
  rows = calls.leading_size(shared)
  # Kernels receive only parts with channels; the scale applies to the private
  # channels.
  parts = [x for x in (shared, private) if x.shape[-1]]
  # Rounded to the stream's dtype, as in the reference.
  scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(
    KERNELS[chosen.kind], add_norm.KERNELS[chosen.kind],
    NormOptions(scale if len(parts) > 1 else 1.0, eps, chosen.interpret),
  )
  optional = [] if len(parts) == 1 else calls.as_rows(d_private)
  encoded = [] if scales is None else [_flatten_rows_per_rank(scales, rows)]
  # The casts are outside the custom derivative, so that jax transposes them and
  # sums the cotangent of a replicated gain over the mesh axes.
  operands = calls.unify_varying_axes(
    gain.astype(jnp.float32), _flatten_rows_per_rank(partial, rows),
    *calls.as_rows(*parts), *optional, *encoded,
  )
  gain, partial, *operands = operands
  num = len(parts)
  new, normed = _fused(
    options,
    tuple(operands[:num]),
    partial,
    operands[-1] if encoded else None,
    operands[num] if optional else None,
    gain,
  )
  return (
    *calls.as_arrays(new, (shared, private)),
    normed.reshape(*shared.shape[:-1], normed.shape[-1]),
  )


def _flatten_rows_per_rank(x: jax.Array, rows: int) -> jax.Array:
  """Flattens an array of r ranks, ``[r, ..., n]``, to ``[r, rows, n]``."""
  return x.reshape(x.shape[0], rows, x.shape[-1])


class _Options(NamedTuple):
  """Static options: known when the program is traced.

  Attributes:
    kernels: Kernels of the forward pass on the platform.
    add_norm: Kernels of the backward pass on the platform.
    norm: Options of both.
  """

  kernels: Kernels
  add_norm: add_norm.Kernels
  norm: NormOptions


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, parts, partial, scales, d_private, gain):
  new, normed = options.kernels.forward(
    parts, partial, scales, d_private, gain, options.norm
  )
  return tuple(new), normed


def _forward(options, parts, partial, scales, d_private, gain):
  new, normed = _fused(options, parts, partial, scales, d_private, gain)
  return (new, normed), (new, gain, partial, scales)


def _backward(options, residuals, cotangents):
  new, gain, partial, scales = residuals
  d_parts, d_private, d_gain = options.add_norm.backward(
    new, gain, *cotangents, options.norm
  )
  if scales is None:
    # Each rank's partial sum is a summand of the new shared channels, and has
    # their cotangent.
    d_partial = jnp.broadcast_to(
      d_parts[0].astype(partial.dtype), partial.shape
    )
    d_scales = None
  else:
    # Constants. jax requires float0 cotangents for integer operands.
    d_partial = np.zeros(partial.shape, jax.dtypes.float0)
    d_scales = jnp.zeros_like(scales)
  d_private = d_private if len(new) > 1 else None
  return tuple(d_parts), d_partial, d_scales, d_private, d_gain


_fused.defvjp(_forward, _backward)
