"""Residual add and RMSNorm, by the best implementation that there is."""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.add_norm import gpu, reference, tpu
from parallel.kernels.selection import Choice, Implementation, choose

_KERNELS = {"tpu": tpu, "gpu": gpu}


def choice(
  shared: jax.Array,
  private: jax.Array,
  implementation: Implementation = "auto",
) -> Choice:
  """Which implementation `add_norm` uses, and why not another.

  Args:
    shared: As for `add_norm`; so are the others. Shapes and dtypes suffice.
    private: As for `add_norm`.
    implementation: As for `add_norm`.
  """
  width = shared.shape[-1] + private.shape[-1]
  rows = calls.leading(shared)
  return choose(
    "add_norm",
    implementation,
    lambda kind: _KERNELS[kind].refusal(rows, width, shared.dtype),
  )


def add_norm(
  shared: jax.Array,
  private: jax.Array,
  d_shared: jax.Array | None,
  d_private: jax.Array | None,
  gain: jax.Array,
  *,
  private_scale: float = 1.0,
  eps: float = 1e-5,
  implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds an update to a stream and normalises the result, in one pass.

  Bytes with n rows: read 2 n H elements, write 2 n H (n H and n H without an
  update); backward read 3 n H, write n H and, for a scale other than 1, n P.

  The derivative is the reference's in exact arithmetic; kernels sum it in
  float32 and round once, where autodiff rounds each term.

  Args:
    shared: ``[..., K]``; K or P may be 0.
    private: ``[..., P]``, of the same dtype.
    d_shared: ``[..., K]``; None: no update.
    d_private: ``[..., P]``; None with ``d_shared``.
    gain: ``[H]``, H = K + P.
    private_scale: Multiplies ``d_private``.
    eps: Added to the mean square.
    implementation: "auto", or names in order of preference: see
      `parallel.kernels.selection`.

  Returns:
    The new shared and private channels, and ``[..., H]``: the normalised row.

  Raises:
    ValueError: An unknown implementation, or none that takes these operands.
  """
  chosen = choice(shared, private, implementation)
  if chosen.name == "reference":
    return reference.add_norm(
      shared, private, d_shared, d_private, gain,
      private_scale=private_scale, eps=eps,
    )
  dtype = shared.dtype
  scale = float(np.asarray(private_scale, dtype))
  stream = [(shared, d_shared, 1.0), (private, d_private, scale)]
  stream = [part for part in stream if part[0].shape[-1]]
  parts, updates, scales = zip(*stream, strict=True)
  updates = () if d_shared is None else updates
  options = _Options(_KERNELS[chosen.kind], scales, eps, chosen.interpret)
  operands = calls.same_axes(
    *calls.as_rows(*parts, *updates), gain.astype(jnp.float32)
  )
  num = len(parts)
  new, normed = _fused(
    options,
    tuple(operands[:num]),
    tuple(operands[num:-1]),
    operands[-1],
  )
  new = iter(new)
  results = [
    next(new).reshape(x.shape) if x.shape[-1] else x
    for x in (shared, private)
  ]
  return *results, normed.reshape(*shared.shape[:-1], normed.shape[-1])


class _Options(NamedTuple):
  """What is known when the program is traced."""

  kernels: ModuleType
  scales: tuple[float, ...]
  eps: float
  interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, parts, updates, gain):
  kernels, scales, eps, interpret = options
  new, normed = kernels.forward(parts, updates, gain, scales, eps, interpret)
  return tuple(new), normed


def _forward(options, parts, updates, gain):
  new, normed = _fused(options, parts, updates, gain)
  return (new, normed), (new, gain, bool(updates))


def _backward(options, residuals, cotangents):
  new, gain, add = residuals
  kernels, scales, eps, interpret = options
  d_new, d_normed = cotangents
  d_parts, d_updates, d_gain = kernels.backward(
    new, gain, d_new, d_normed, scales if add else (), eps, interpret
  )
  return tuple(d_parts), tuple(d_updates), d_gain


_fused.defvjp(_forward, _backward)
