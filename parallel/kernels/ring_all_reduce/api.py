"""Partial all-reduce of an update, residual add and RMSNorm in one kernel.

Shape legend: n = devices of the axis, K = shared channels, P = private
channels.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.add_norm import reference as add_norm
from parallel.kernels.add_norm import tpu as add_norm_tpu
from parallel.kernels.add_norm.reference import NormOptions
from parallel.kernels.ring_all_reduce import tpu
from parallel.kernels.selection import Implementation, SelectedKernel, choose


def select_kernel(
  shared: jax.Array,
  private: jax.Array,
  devices: int,
  implementation: Implementation = "auto",
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the operands.

  Args:
    shared: Shared channels of the stream, ``[..., K]``, or a
      ``jax.ShapeDtypeStruct``: only shape and dtype are used.
    private: Private channels, ``[..., P]``, or their type.
    devices: Number of devices of the axis, n.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  rows, k, p = calls.leading_size(shared), shared.shape[-1], private.shape[-1]

  def refusal(kind):
    if kind != "tpu":
      return "no kernel for this platform"
    # The backward pass is a kernel of add_norm.
    return tpu.refusal(
      rows, k, p, shared.dtype, devices
    ) or add_norm_tpu.refusal(rows, k + p, shared.dtype)

  return choose("ring_partial_all_reduce", implementation, refusal)


def ring_partial_all_reduce(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  d_private: jax.Array,
  gain: jax.Array,
  *,
  axis_name: str,
  private_scale: float = 1.0,
  eps: float = 1e-5,
  implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """All-reduces partial sums, adds them to the residual stream, normalises it.

  Must be called inside ``jax.shard_map``. A device sends ``2 (n - 1) / n`` of
  the bytes of ``partial``, half of them in each direction of a ring, in which
  device i + 1 should be physically adjacent to device i. The backward pass sums
  the cotangents of ``partial`` over the axis, as CAAT-Net's row-parallel
  projection does.

  Args:
    shared: Shared channels of the stream, ``[..., K]``, equal on all devices.
    private: Private channels, ``[..., P]``, of the same dtype.
    partial: This device's partial sum of the shared channels' update,
      ``[..., K]``.
    d_private: Update of the private channels, ``[..., P]``.
    gain: Gain of the norm, ``[K + P]``.
    axis_name: Mesh axis to sum over.
    private_scale: Factor of ``d_private``.
    eps: Constant added to the mean square.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`. The reference is a ``psum``, whose order
      of summation is chosen by the backend.

  Returns:
    The new shared channels ``[..., K]``, the new private channels ``[..., P]``
    and the normalised row ``[..., K + P]``. All of them are device-varying by
    type; the values of the shared channels are equal on all devices.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  chosen = select_kernel(
    shared, private, lax.axis_size(axis_name), implementation
  )
  # The index is included for its type: it makes all operands vary over the
  # axis, even if each of them is replicated.
  operands = calls.unify_varying_axes(
    lax.axis_index(axis_name).astype(jnp.float32),
    *calls.as_rows(shared, private, partial, d_private),
    gain.astype(jnp.float32),
  )[1:]
  # Rounded to the stream's dtype, as in the reference.
  scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(axis_name, scale, eps, chosen.interpret)
  if chosen.name == "reference":
    out = _by_psum(options, *operands)
  else:
    out = _fused(options, *operands)
  lead = shared.shape[:-1]
  return tuple(x.reshape(*lead, x.shape[-1]) for x in out)


class _Options(NamedTuple):
  """Static options: known when the program is traced.

  Attributes:
    axis_name: Mesh axis to sum over.
    private_scale: Factor of the private update.
    eps: Constant added to the mean square.
    interpret: Whether the kernels are interpreted.
  """

  axis_name: str
  private_scale: float
  eps: float
  interpret: bool


def _by_psum(options, shared, private, partial, d_private, gain):
  """Computes `ring_partial_all_reduce` without a kernel, by a psum."""
  return add_norm.add_norm(
    shared, private, _psum(options.axis_name, partial), d_private, gain,
    private_scale=options.private_scale, eps=options.eps,
  )


def _psum(name, x):
  """Sums over a mesh axis; the transpose sums the cotangents.

  Cotangents differ between devices, since private channels do. The cotangent of
  every device's partial sum is the sum over all devices, because the transpose
  of the cast to varying is a psum.
  """
  return lax.pcast(lax.psum(x, name), name, to="varying")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, shared, private, partial, d_private, gain):
  return tpu.ring_partial_all_reduce(
    shared, private, partial, d_private, gain, **options._asdict()
  )


def _forward(options, *operands):
  # The backward pass recomputes the statistics from the new stream.
  new_shared, new_private, normed = _fused(options, *operands)
  return (new_shared, new_private, normed), (
    new_shared, new_private, operands[-1]
  )


def _backward(options, residuals, cotangents):
  *new, gain = residuals
  *d_new, d_normed = cotangents
  (d_shared, d_private), d_update, d_gain = add_norm_tpu.backward(
    new, gain, d_new, d_normed,
    NormOptions(options.private_scale, options.eps, options.interpret),
  )
  # The ring kernel serves the forward pass only; XLA reduces the cotangents.
  d_partial = _psum(options.axis_name, d_shared)
  return d_shared, d_private, d_partial, d_update, d_gain


_fused.defvjp(_forward, _backward)
