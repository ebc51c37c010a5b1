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
  """See ``reference.add_norm``; kernels do it in one pass.

  Bytes with n rows: read 2 n H elements, write 2 n H (n H and n H without an
  update); backward read 3 n H, write n H and, for a scale other than 1, n P.

  The derivative is the reference's in exact arithmetic; kernels sum it in
  float32 and round once, where autodiff rounds each term.

  Args:
    shared: As for the reference; so are the others.
    private: As for the reference.
    d_shared: As for the reference.
    d_private: As for the reference.
    gain: As for the reference.
    private_scale: As for the reference.
    eps: As for the reference.
    implementation: "auto", or names in order of preference: see
      `parallel.kernels.selection`.

  Returns:
    See the reference.

  Raises:
    ValueError: An unknown implementation, or none that takes these operands.
  """
  chosen = choice(shared, private, implementation)
  if chosen.name == "reference":
    return reference.add_norm(
      shared, private, d_shared, d_private, gain,
      private_scale=private_scale, eps=eps,
    )
  parts = [x for x in (shared, private) if x.shape[-1]]
  updates, scale = [], 1.0
  if d_shared is not None:
    updates = [d for d in (d_shared, d_private) if d.shape[-1]]
    if d_private.shape[-1]:
      scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(
    _KERNELS[chosen.kind], bool(updates), scale, eps, chosen.interpret
  )
  *rows, gain = calls.same_axes(
    *calls.as_rows(*parts, *updates), gain.astype(jnp.float32)
  )
  new, normed = _fused(
    options, tuple(rows[: len(parts)]), tuple(rows[len(parts) :]), gain
  )
  return (
    *calls.as_arrays(new, (shared, private)),
    normed.reshape(*shared.shape[:-1], normed.shape[-1]),
  )


class _Options(NamedTuple):
  """What is known when the program is traced."""

  kernels: ModuleType
  add: bool
  scale: float
  eps: float
  interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, parts, updates, gain):
  kernels, _, *rest = options
  new, normed = kernels.forward(parts, updates, gain, *rest)
  return tuple(new), normed


def _forward(options, parts, updates, gain):
  new, normed = _fused(options, parts, updates, gain)
  return (new, normed), (new, gain)


def _backward(options, residuals, cotangents):
  kernels, add, *rest = options
  d_parts, d_last, d_gain = kernels.backward(*residuals, *cotangents, *rest)
  d_updates = (*d_parts[:-1], d_last) if add else ()
  return tuple(d_parts), d_updates, d_gain


_fused.defvjp(_forward, _backward)
