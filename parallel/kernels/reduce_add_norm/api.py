"""Sum over ranks, residual add and RMSNorm, by the preferred implementation.

Shape legend: r = ranks, K = shared channels, P = private channels, H = K + P.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.add_norm import gpu as add_norm_gpu
from parallel.kernels.add_norm import tpu as add_norm_tpu
from parallel.kernels.reduce_add_norm import gpu, reference, tpu
from parallel.kernels.selection import Choice, Implementation, choose

# Modules of the forward and of the backward, which is add_norm's: a sum passes
# its cotangent on to all summands, so nothing but the norm is left to do.
_KERNELS = {"tpu": (tpu, add_norm_tpu), "gpu": (gpu, add_norm_gpu)}


def choice(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  scales: jax.Array | None,
  implementation: Implementation = "auto",
) -> Choice:
  """Returns which implementation is used, and why others do not run.

  Only shapes and dtypes of the arrays are read, so each may be a
  ``jax.ShapeDtypeStruct``.

  Args:
    shared: Shared channels of the stream, ``[..., K]``.
    private: Private channels, ``[..., P]``.
    partial: Every rank's partial sum, ``[r, ..., K]``.
    scales: Scales of encoded partial sums, ``[r, ..., K / block]``, or None.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """
  rows, k, p = calls.leading(shared), shared.shape[-1], private.shape[-1]
  block = None
  if scales is not None:
    block = k // scales.shape[-1]

  def refusal(kind):
    kernels, add_norm = _KERNELS[kind]
    return kernels.refusal(
      rows, k, p, shared.dtype, partial.shape[0], partial.dtype, block
    ) or add_norm.refusal(rows, k + p, shared.dtype)

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
  """Sums the ranks' partial sums, adds them to the stream and normalises it.

  ``reference.reduce_add_norm`` specifies the result. Kernels make one pass over
  memory.

  Args:
    shared: Shared channels of the stream, ``[..., K]``.
    private: Private channels, ``[..., P]``, of the same dtype; P may be 0.
    partial: Every rank's partial sum of the shared channels' update,
      ``[r, ..., K]``; int8 codes if there are scales.
    scales: float32 ``[r, ..., K / block]``; None if ``partial`` is not encoded.
      Encoded partial sums are constants: no derivative goes through them.
    d_private: Update of the private channels, ``[..., P]``.
    gain: Gain of the norm, float32 ``[H]``.
    private_scale: Factor of ``d_private``.
    eps: Added to the mean square.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Returns:
    The new shared channels ``[..., K]``, the new private channels ``[..., P]``
    and the normalised row ``[..., H]``.

  Raises:
    ValueError: The number of scales does not divide K, an implementation is
      unknown, or no preferred kernel takes the operands.
  """
  if scales is not None and shared.shape[-1] % scales.shape[-1]:
    raise ValueError(
      f"{scales.shape[-1]} scales for {shared.shape[-1]} shared channels: "
      "blocks must be of one size"
    )
  chosen = choice(shared, private, partial, scales, implementation)
  if chosen.name == "reference":
    return reference.reduce_add_norm(
      shared, private, partial, scales, d_private, gain,
      private_scale=private_scale, eps=eps,
    )
  rows = calls.leading(shared)
  # Kernels get only parts that have channels; scale belongs to the private one.
  parts = [x for x in (shared, private) if x.shape[-1]]
  # Rounded to the stream's dtype, as the reference does.
  scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(
    *_KERNELS[chosen.kind], scale if len(parts) > 1 else 1.0, eps,
    chosen.interpret,
  )
  optional = [] if len(parts) == 1 else calls.as_rows(d_private)
  encoded = [] if scales is None else [_ranks_of_rows(scales, rows)]
  # Cast outside the custom derivative, so that jax transposes the casts: the
  # cotangent of a replicated gain is then summed over the mesh axes.
  operands = calls.same_axes(
    gain.astype(jnp.float32), _ranks_of_rows(partial, rows),
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


def _ranks_of_rows(x: jax.Array, rows: int) -> jax.Array:
  """Flattens ``[r, ..., n]`` to ``[r, rows, n]``."""
  return x.reshape(x.shape[0], rows, x.shape[-1])


class _Options(NamedTuple):
  """What is known when the program is traced.

  Attributes:
    kernels: The module with the kernel ``forward``.
    add_norm: The module with the kernel ``backward``.
    private_scale: Factor of the private update; 1 if there are no private
      channels.
    eps: Added to the mean square.
    interpret: Whether the kernels are interpreted.
  """

  kernels: ModuleType
  add_norm: ModuleType
  private_scale: float
  eps: float
  interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, parts, partial, scales, d_private, gain):
  kernels, _, *rest = options
  new, normed = kernels.forward(
    parts, partial, scales, d_private, gain, *rest
  )
  return tuple(new), normed


def _forward(options, parts, partial, scales, d_private, gain):
  new, normed = _fused(options, parts, partial, scales, d_private, gain)
  return (new, normed), (new, gain, partial, scales)


def _backward(options, residuals, cotangents):
  new, gain, partial, scales = residuals
  _, add_norm, *rest = options
  d_parts, d_private, d_gain = add_norm.backward(
    new, gain, *cotangents, *rest
  )
  if scales is None:
    # Each rank's partial sum is a summand of the new shared channels, so each
    # has their cotangent.
    d_partial = jnp.broadcast_to(
      d_parts[0].astype(partial.dtype), partial.shape
    )
    d_scales = None
  else:
    # Constants: float0 is what jax wants as the cotangent of integers.
    d_partial = np.zeros(partial.shape, jax.dtypes.float0)
    d_scales = jnp.zeros_like(scales)
  d_private = d_private if len(new) > 1 else None
  return tuple(d_parts), d_partial, d_scales, d_private, d_gain


_fused.defvjp(_forward, _backward)
