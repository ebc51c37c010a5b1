"""Sum of partial blocks, residual add and RMSNorm, by the best means."""

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

# The forward, and add_norm's backward.
_KERNELS = {"tpu": (tpu, add_norm_tpu), "gpu": (gpu, add_norm_gpu)}


def choice(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  scales: jax.Array | None,
  implementation: Implementation = "auto",
) -> Choice:
  """Which implementation `reduce_add_norm` uses, and why not another.

  Args:
    shared: As for `reduce_add_norm`; shapes and dtypes suffice.
    private: As for `reduce_add_norm`.
    partial: As for `reduce_add_norm`.
    scales: As for `reduce_add_norm`.
    implementation: As for `reduce_add_norm`.
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
  """See ``reference.reduce_add_norm``; kernels do it in one pass.

  Args:
    shared: As for the reference; so are the others.
    private: As for the reference.
    partial: As for the reference.
    scales: As for the reference.
    d_private: As for the reference.
    gain: As for the reference.
    private_scale: As for the reference.
    eps: As for the reference.
    implementation: "auto", or names in order of preference: see
      `parallel.kernels.selection`.

  Returns:
    See the reference.

  Raises:
    ValueError: Blocks that do not divide K, or no implementation.
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
  parts = [x for x in (shared, private) if x.shape[-1]]
  scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(
    *_KERNELS[chosen.kind], scale if len(parts) > 1 else 1.0, eps,
    chosen.interpret,
  )
  optional = [] if len(parts) == 1 else calls.as_rows(d_private)
  encoded = [] if scales is None else [_ranks_of_rows(scales, rows)]
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
  return x.reshape(x.shape[0], rows, x.shape[-1])


class _Options(NamedTuple):
  """What is known when the program is traced."""

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
    d_partial = jnp.broadcast_to(
      d_parts[0].astype(partial.dtype), partial.shape
    )
    d_scales = None
  else:
    d_partial = np.zeros(partial.shape, jax.dtypes.float0)
    d_scales = jnp.zeros_like(scales)
  d_private = d_private if len(new) > 1 else None
  return tuple(d_parts), d_partial, d_scales, d_private, d_gain


_fused.defvjp(_forward, _backward)
