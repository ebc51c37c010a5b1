"""Residual add and RMSNorm, by the preferred implementation that is available.

Shape legend: n = rows (tokens), K = shared channels, P = private channels,
H = K + P.
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
from parallel.kernels.selection import Implementation, SelectedKernel, choose


class Kernels(Protocol):
  """Kernels of a platform: the functions of ``tpu.py`` and ``gpu.py``.

  A residual stream is passed as a list of its parts: shared channels ``[n, K]``
  and private channels ``[n, P]``, without parts of width 0.
  """

  def refusal(self, num_rows: int, width: int, dtype: jnp.dtype) -> str | None:
    """Returns why a residual stream is not supported, or None if it is.

    Args:
      num_rows: Number of rows (tokens) of the stream, n.
      width: Channels per row, H.
      dtype: Dtype of the stream.
    """
    ...

  def forward(
    self, parts: Sequence[jax.Array], updates: Sequence[jax.Array],
    gain: jax.Array, options: NormOptions,
  ) -> tuple[list[jax.Array], jax.Array]:
    """Adds an update to a residual stream and normalises the result.

    Args:
      parts: Parts of the stream.
      updates: One update per part, of its shape; empty to normalise only.
      gain: Gain of the norm, ``[H]``.
      options: Options of the norm; the scale is the factor of the last update.

    Returns:
      The new parts (``parts`` if there are no updates), and the normalised rows
      ``[n, H]``.
    """
    ...

  def backward(
    self, parts: Sequence[jax.Array], gain: jax.Array,
    d_parts: Sequence[jax.Array], d_normed: jax.Array, options: NormOptions,
  ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the cotangents of the operands of `forward`.

    Args:
      parts: New parts of the stream, as returned by `forward`.
      gain: Gain of the norm, ``[H]``.
      d_parts: Cotangents of the new parts, of their shapes.
      d_normed: Cotangent of the normalised rows, ``[n, H]``.
      options: Options of `forward`.

    Returns:
      Cotangents of the parts, which are also the cotangents of the updates
      except the last; the cotangent of the last update, which is scaled; and
      the cotangent of the gain, float32 ``[H]``.
    """
    ...


KERNELS: dict[str, Kernels] = {"tpu": tpu, "gpu": gpu}


def select_kernel(
  shared: jax.Array,
  private: jax.Array,
  implementation: Implementation = "auto",
) -> SelectedKernel:
  """Selects the first preferred implementation that supports the stream.

  Args:
    shared: Shared channels of the stream, ``[..., K]``, or a
      ``jax.ShapeDtypeStruct``: only shape and dtype are used.
    private: Private channels, ``[..., P]``, or their type.
    implementation: "auto", or names in order of preference.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.
  """
  width = shared.shape[-1] + private.shape[-1]
  rows = calls.leading_size(shared)
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
  """Adds an update to a residual stream and normalises the result.

  ``reference.add_norm`` specifies the result. Kernels use one pass over memory:
  the forward pass reads 2 n H elements and writes 2 n H, or n H and n H without
  an update; the backward pass reads 3 n H and writes n H, plus n P if
  ``private_scale`` is not 1.

  In exact arithmetic the derivative equals that of the reference. Kernels sum
  its terms in float32 and round once; autodiff of the reference rounds each
  term.

  Args:
    shared: Shared channels of the stream (equal on all tensor ranks),
      ``[..., K]``; K or P may be 0.
    private: Private channels (different on each rank), ``[..., P]``, of the
      same dtype.
    d_shared: Update of the shared channels, ``[..., K]``; None to normalise
      only.
    d_private: Update of the private channels, ``[..., P]``; None if and only if
      ``d_shared`` is None.
    gain: Gain of the norm, float32 ``[H]``.
    private_scale: Factor of ``d_private``.
    eps: Constant added to the mean square.
    implementation: "auto", or names in order of preference; see
      `parallel.kernels.selection`.

  Returns:
    The new shared channels ``[..., K]``, the new private channels ``[..., P]``
    and the normalised row ``[..., H]``.

  Raises:
    ValueError: A name is unknown, or no preferred implementation supports the
      operands.

  Example:
    >>> f = jax.jit(functools.partial(
    ...   add_norm, private_scale=2.0, implementation="reference"
    ... ))
    >>> row = np.float32([[3]]), np.float32([[-2]])  # shared, private
    >>> update = np.float32([[0]]), np.float32([[-1]])
    >>> new_shared, new_private, normed = f(*row, *update, np.ones(2, "f4"))
    >>> new_shared.tolist(), new_private.tolist()
    ([[3.0]], [[-4.0]])
    >>> np.round(np.float64(normed), 2).tolist()  # divided by rms, sqrt(12.5)
    [[0.85, -1.13]]
  """
  chosen = select_kernel(shared, private, implementation)
  if chosen.name == "reference":
    return reference.add_norm(
      shared, private, d_shared, d_private, gain,
      private_scale=private_scale, eps=eps,
    )
  # Kernels receive only parts with channels. The scale applies to the last
  # part: it is 1 if there are no private channels or no update.
  parts = [x for x in (shared, private) if x.shape[-1]]
  updates, scale = [], 1.0
  if d_shared is not None:
    updates = [d for d in (d_shared, d_private) if d.shape[-1]]
    if d_private.shape[-1]:
      # Rounded to the stream's dtype, as in the reference.
      scale = float(np.asarray(private_scale, shared.dtype))
  options = _Options(
    KERNELS[chosen.kind], bool(updates),
    NormOptions(scale, eps, chosen.interpret),
  )
  # The casts are outside the custom derivative, so that jax transposes them and
  # sums the cotangent of a replicated gain over the mesh axes.
  *rows, gain = calls.unify_varying_axes(
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
  """Static options: known when the program is traced.

  Attributes:
    kernels: Kernels of the platform.
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
  # Residuals include neither the update nor the statistics: the backward pass
  # recomputes the statistics from the new stream.
  return (new, normed), (new, gain)


def _backward(options, residuals, cotangents):
  d_parts, d_last, d_gain = options.kernels.backward(
    *residuals, *cotangents, options.norm
  )
  # Both operands of a sum have the cotangent of the sum. The cotangent of the
  # last update differs, since it was scaled before the addition.
  d_updates = (*d_parts[:-1], d_last) if options.add else ()
  return tuple(d_parts), d_updates, d_gain


_fused.defvjp(_forward, _backward)
