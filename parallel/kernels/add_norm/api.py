"""Residual add and RMSNorm, by the preferred implementation that is available.

Shape legend: n = rows, K = shared channels, P = private channels, H = K + P.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.add_norm import gpu, reference, tpu
from parallel.kernels.add_norm.reference import NormOptions
from parallel.kernels.selection import Choice, Implementation, choose


class Kernels(Protocol):
  """Kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``.

  A stream is given in parts, its shared channels ``[n, K]`` and its private
  channels ``[n, P]``, without a part of width 0.
  """

  def refusal(self, num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
    """Returns why the kernels do not take a stream, or None if they do.

    Args:
      num_rows: Rows of the stream, n.
      width: Channels per row, H.
      dtype: Dtype of the stream.
    """
    ...

  def forward(
    self, parts: Sequence[jax.Array], updates: Sequence[jax.Array],
    gain: jax.Array, options: NormOptions,
  ) -> tuple[list[jax.Array], jax.Array]:
    """Adds an update to a stream and normalises the result.

    Args:
      parts: The parts of the stream.
      updates: One update per part, of its shape; empty if the stream is only
        normalised.
      gain: Gain of the norm, ``[H]``.
      options: The scale is that of the last update.

    Returns:
      The new parts (without updates the old ones), and the normalised rows
      ``[n, H]``.
    """
    ...

  def backward(
    self, parts: Sequence[jax.Array], gain: jax.Array,
    d_parts: Sequence[jax.Array], d_normed: jax.Array, options: NormOptions,
  ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Takes the cotangents of the results of `forward` back to its operands.

    Args:
      parts: The new parts of the stream, as `forward` returned them.
      gain: Gain of the norm, ``[H]``.
      d_parts: Cotangents of the new parts, of their shapes.
      d_normed: Cotangent of the normalised rows, ``[n, H]``.
      options: Those of `forward`.

    Returns:
      Cotangents of the parts (and of all updates but the last); that of the
      last update, which is scaled; and that of the gain, ``[H]`` float32.
    """
    ...


KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


def choice(
  shared: jax.Array,
  private: jax.Array,
  implementation: Implementation = "auto",
) -> Choice:
  """Returns which implementation `add_norm` uses, and why others do not run.

  Args:
    shared: Shared channels of the stream, ``[..., K]``. Only shape and dtype
      are read, so a ``jax.ShapeDtypeStruct`` will do.
    private: Private channels, ``[..., P]``, or their type likewise.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """
  width = shared.shape[-1] + private.shape[-1]
  rows = calls.leading(shared)
  return choose(
    "add_norm",
    implementation,
    lambda kind: KERNELS[kind].refusal(rows, width, shared.dtype),
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
  """Adds an update to a stream and normalises the result.

  ``reference.add_norm`` specifies the result. Kernels make one pass over
  memory: the forward reads 2 n H elements and writes 2 n H, or n H and n H
  without an update; the backward reads 3 n H and writes n H, and n P more if
  ``private_scale`` is not 1.

  In exact arithmetic the derivative is that of the reference. Kernels sum its
  terms in float32 and round once, where autodiff of the reference rounds each.

  Args:
    shared: Shared channels of the stream, ``[..., K]``; K or P may be 0.
    private: Private channels, ``[..., P]``, of the same dtype.
    d_shared: Update of the shared channels, ``[..., K]``; None if the stream is
      only normalised.
    d_private: Update of the private channels, ``[..., P]``; None exactly where
      ``d_shared`` is.
    gain: Gain of the norm, float32 ``[H]``.
    private_scale: Factor of ``d_private``.
    eps: Added to the mean square.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Returns:
    The new shared channels ``[..., K]``, the new private channels ``[..., P]``
    and the normalised row ``[..., H]``.

  Raises:
    ValueError: A name is unknown, or no preferred kernel takes the operands.
  """
  chosen = choice(shared, private, implementation)
  if chosen.name == "reference":
    return reference.add_norm(
      shared, private, d_shared, d_private, gain,
      private_scale=private_scale, eps=eps,
    )
  # Kernels get only parts that have channels. The last part is the scaled one:
  # scale stays 1 if there are no private channels or no update.
  parts = [x for x in (shared, private) if x.shape[-1]]
  updates, scale = [], 1.0
  if d_shared is not None:
    updates = [d for d in (d_shared, d_private) if d.shape[-1]]
    if d_private.shape[-1]:
      # Rounded to the stream's dtype, as the reference does.
      scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(
    KERNELS[chosen.kind], bool(updates),
    NormOptions(scale, eps, chosen.interpret),
  )
  # Cast outside the custom derivative, so that jax transposes the casts: the
  # cotangent of a replicated gain is then summed over the mesh axes.
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
  """What is known when the program is traced.

  Attributes:
    kernels: The platform's kernels.
    add: Whether there is an update.
    norm: Options of the kernels.
  """

  kernels: Kernels
  add: bool
  norm: NormOptions


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, parts, updates, gain):
  new, normed = options.kernels.forward(parts, updates, gain, options.norm)
  return tuple(new), normed


def _forward(options, parts, updates, gain):
  new, normed = _fused(options, parts, updates, gain)
  # Neither the update nor the statistics are residuals: the backward computes
  # the statistics again from the new stream.
  return (new, normed), (new, gain)


def _backward(options, residuals, cotangents):
  d_parts, d_last, d_gain = options.kernels.backward(
    *residuals, *cotangents, options.norm
  )
  # An addition passes its cotangent on to both operands. The last update has a
  # cotangent of its own, since it was scaled before it was added.
  d_updates = (*d_parts[:-1], d_last) if options.add else ()
  return tuple(d_parts), d_updates, d_gain


_fused.defvjp(_forward, _backward)
