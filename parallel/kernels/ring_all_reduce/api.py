"""Partial all-reduce of an update, residual add and RMSNorm in one kernel."""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.add_norm import reference as add_norm
from parallel.kernels.add_norm import tpu as add_norm_tpu
from parallel.kernels.ring_all_reduce import tpu
from parallel.kernels.selection import Choice, Implementation, choose


def choice(
  shared: jax.Array,
  private: jax.Array,
  devices: int,
  implementation: Implementation = "auto",
) -> Choice:
  """Which implementation runs, and why not another.

  Args:
    shared: As for `ring_partial_all_reduce`; shapes and dtypes suffice.
    private: As for `ring_partial_all_reduce`.
    devices: Of the axis.
    implementation: As for `ring_partial_all_reduce`.
  """
  rows, k, p = calls.leading(shared), shared.shape[-1], private.shape[-1]

  def refusal(kind):
    if kind != "tpu":
      return "no kernel for this platform"
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
  """Sums the shared channels of an update over a mesh axis, adds, normalises.

  Inside ``jax.shard_map``. Sent per device: ``2 (n - 1) / n`` of ``partial``,
  half of it each way around a ring. Device i + 1 should be a neighbour of
  device i. The backward sums the cotangents of ``partial`` over the axis, as
  CAAT-Net's row door does.

  Args:
    shared: ``[..., K]``, the stream, equal on all devices.
    private: ``[..., P]``, of the same dtype.
    partial: ``[..., K]``, this device's partial sum.
    d_private: ``[..., P]``.
    gain: ``[K + P]``.
    axis_name: The mesh axis.
    private_scale: Multiplies ``d_private``.
    eps: Added to the mean square.
    implementation: "auto", or names in order of preference: see
      `parallel.kernels.selection`. The reference is a ``psum``, whose order
      of summation the backend chooses.

  Returns:
    The new shared and private channels, and ``[..., K + P]``: the normalised
    row. All vary over the axis by type.
  """
  chosen = choice(shared, private, lax.axis_size(axis_name), implementation)
  operands = calls.same_axes(
    lax.axis_index(axis_name).astype(jnp.float32),
    *calls.as_rows(shared, private, partial, d_private),
    gain.astype(jnp.float32),
  )[1:]
  scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(axis_name, scale, eps, chosen.interpret)
  if chosen.name == "reference":
    out = _by_psum(options, *operands)
  else:
    out = _fused(options, *operands)
  lead = shared.shape[:-1]
  return tuple(x.reshape(*lead, x.shape[-1]) for x in out)


class _Options(NamedTuple):
  """What is known when the program is traced."""

  axis_name: str
  private_scale: float
  eps: float
  interpret: bool


def _by_psum(options, shared, private, partial, d_private, gain):
  return add_norm.add_norm(
    shared, private, _psum(options.axis_name, partial), d_private, gain,
    private_scale=options.private_scale, eps=options.eps,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _psum(name, x):
  """Whose transpose sums, too: cotangents are partial sums."""
  return lax.pcast(lax.psum(x, name), name, to="varying")


_psum.defvjp(
  lambda name, x: (_psum(name, x), None),
  lambda name, _, cotangent: (_psum(name, cotangent),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, shared, private, partial, d_private, gain):
  return tpu.ring_partial_all_reduce(
    shared, private, partial, d_private, gain, **options._asdict()
  )


def _forward(options, *operands):
  new_shared, new_private, normed = _fused(options, *operands)
  return (new_shared, new_private, normed), (
    new_shared, new_private, operands[-1]
  )


def _backward(options, residuals, cotangents):
  *new, gain = residuals
  *d_new, d_normed = cotangents
  (d_shared, d_private), d_update, d_gain = add_norm_tpu.backward(
    new, gain, d_new, d_normed, options.private_scale, options.eps,
    options.interpret,
  )
  d_partial = _psum(options.axis_name, d_shared)
  return d_shared, d_private, d_partial, d_update, d_gain


_fused.defvjp(_forward, _backward)
