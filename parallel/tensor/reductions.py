"""Sums of row-parallel projections over ranks, forward and backward.

Partial sums are reduced by a function of `parallel.routes`, or by a kernel that
also adds the sum to the residual stream and normalises the stream. In both
cases the backward is written by hand: it sums the ranks' cotangents of the
shared channels, in a dtype that can differ from that of the forward.

Shape legend: B = batch, T = position, H = width (stream channels), K = shared
channels, P = H - K private ones.
"""

from collections.abc import Callable
import functools

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from parallel.axes import Axis
from parallel.collectives import Reduction, varying
from parallel.kernels.add_norm import api as add_norm
from parallel.kernels.calls import unify_varying_axes
from parallel.kernels.reduce_add_norm import api as one_shot
from parallel.kernels.ring_all_reduce import api as ring
from parallel.kernels.selection import Implementation
from parallel.routes import gather_parts
from parallel.tensor.partial_sync import PROJECTION_ROUTES, PartialSync

# Name of the reduced values, by which remat policies select them.
REDUCED_NAME = "reduced"

# Maps one rank's shared [B, T, K] and private channels [B, T, P], its partial
# sums [B, T, K], the update of its private channels [B, T, P] and the gain [H]
# to new shared and private channels and the normalised rows [B, T, H].
ReduceAddNorm = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def sum_over_ranks(
  y: jax.Array, name: str, sync: PartialSync
) -> jax.Array:
  """All-reduces shared channels, and in the backward their cotangents.

  The result is equal on all ranks in value, but device-varying by type, since
  its cotangents differ between ranks. If it were invarying, every use of it
  would be cast to varying, and the transpose of that cast is an all-reduce with
  a dtype and position that cannot be chosen.

  Args:
    y: Partial sums of this device, ``[B, T, K]``.
    name: Mesh axis of the tensor ranks.
    sync: Dtypes and algorithm of the reductions.

  Returns:
    The sums ``[B, T, K]`` in y's dtype, named ``REDUCED_NAME`` for remat
    policies.
  """
  if lax.axis_size(name) == 1:
    return checkpoint_name(varying(y, name), REDUCED_NAME)
  total = _with_transpose(
    lambda y: varying(_sum_in(y, name, sync.forward_dtype, sync.route), name),
    lambda g: varying(_sum_in(g, name, sync.backward_dtype, sync.route), name),
    y,
  )
  return checkpoint_name(total, REDUCED_NAME)


def reduce_add_norm_kernel(
  rows: tuple[int, ...],
  width: int,
  dtype: jnp.dtype,
  axis: Axis,
  sync: PartialSync,
  implementation: Implementation,
) -> Callable[[float], ReduceAddNorm] | None:
  """Returns the kernel of ``sync.route`` that reduces, adds and normalises.

  With "one_shot", all ranks' partial sums are gathered, and the kernel adds
  them. With "ring_kernel", the kernel reduces them. The backward sums the
  ranks' cotangents without a kernel (with "ring_kernel" by a psum).

  Rematerialization that does not repeat the reduction must save the new stream
  and the normalised rows: 2 H channels, where `sum_over_ranks` alone saves K.

  Args:
    rows: Sizes of the stream's batch and position dims, B and T.
    width: Channels of the stream, H.
    dtype: Dtype of the stream.
    axis: The tensor axis.
    sync: Shared channels and their reduction.
    implementation: Implementations in order of preference, as in
      `parallel.kernels.selection`.

  Returns:
    Function that returns the kernel for eps, the number that is added to the
    mean square; None if ``sync.route`` has no kernel for such a stream.

  Raises:
    ValueError: The kernel does not support the dtype of the reduction.
  """
  k, sent = sync.num_shared(width), sync.forward_dtype
  shared, private = (
    jax.ShapeDtypeStruct((*rows, n), dtype) for n in (k, width - k)
  )
  if sync.route == "one_shot":
    parts = jax.ShapeDtypeStruct((axis.devices, *shared.shape), sent or dtype)
    chosen = one_shot.select_kernel(
      shared, private, parts, None, implementation
    )
  elif sync.route == "ring_kernel":
    if sent not in (None, dtype.name):
      raise ValueError(
        f"forward_dtype={sent!r} must be '' or {dtype.name!r} with "
        "route='ring_kernel', which reduces in the stream's dtype"
      )
    chosen = ring.select_kernel(shared, private, axis.devices, implementation)
  else:
    return None
  if chosen.name == "reference":  # no kernel: reduce in the row projection
    return None
  return functools.partial(_reduce_add_norm, axis, sync, implementation)


def _reduce_add_norm(
  axis: Axis, sync: PartialSync, implementation: Implementation, eps: float
) -> ReduceAddNorm:
  """Builds the kernel of ``sync.route``, with its derivative.

  The route is one of ``FUSED_ROUTES``; other arguments are those of
  `reduce_add_norm_kernel` and the number that is added to the mean square.
  """
  options = {
    "private_scale": sync.scale(axis), "eps": eps,
    "implementation": implementation,
  }

  def reduce_gathered(shared, private, partial, d_private, gain):
    # [ranks, B, T, K]
    parts = gather_parts(
      _cast_for_reduction(partial, sync.forward_dtype), axis.name
    )
    return one_shot.reduce_add_norm(
      shared, private, parts, None, d_private, gain, **options
    )

  reduce = reduce_gathered
  if sync.route == "ring_kernel":
    reduce = functools.partial(
      ring.ring_partial_all_reduce, axis_name=axis.name, **options
    )
  norm = functools.partial(
    add_norm.add_norm, eps=eps, implementation=implementation
  )
  return _differentiable(reduce, norm, axis, sync)


def _differentiable(
  reduce: ReduceAddNorm,
  norm: ReduceAddNorm,
  axis: Axis,
  sync: PartialSync,
) -> ReduceAddNorm:
  """Returns ``reduce`` with a derivative, by that of ``norm``.

  ``reduce`` sums an update over ranks, adds and normalises; ``norm`` normalises
  the new stream.

  Partial sums are added to the stream, so the cotangent of a rank's partial sum
  equals that of the new shared channels, summed over ranks. Autodiff would
  transpose the gather instead, which sends a cotangent for each rank's block.
  """
  differentiable = jax.custom_vjp(reduce)

  def forward(*operands):
    # The residuals are named, so that a remat policy can save them: recomputing
    # them repeats the reduction.
    new = [checkpoint_name(x, REDUCED_NAME) for x in reduce(*operands)]
    gain = operands[-1]
    return tuple(new), (*new[:2], gain)

  def backward(residuals, cotangents):
    _, transpose = jax.vjp(
      lambda shared, private, gain: norm(shared, private, None, None, gain),
      *residuals,
    )
    d_shared, d_private, d_gain = transpose(cotangents)
    total = _sum_in(d_shared, axis.name, sync.backward_dtype, sync.route)
    scale = jnp.asarray(sync.scale(axis), d_private.dtype)
    # Cotangents of shared channels, private channels, partial sums, update of
    # private channels, and gain.
    return (
      d_shared, d_private, varying(total, axis.name), d_private * scale, d_gain
    )

  differentiable.defvjp(forward, backward)
  return lambda *operands: differentiable(*unify_varying_axes(*operands))


def _with_transpose(
  f: Callable[[jax.Array], jax.Array],
  transpose: Callable[[jax.Array], jax.Array],
  x: jax.Array,
) -> jax.Array:
  """Returns ``f(x)`` for a linear f whose backward is the given transpose."""
  linear = jax.custom_vjp(f)
  linear.defvjp(lambda x: (f(x), None), lambda _, g: (transpose(g),))
  return linear(x)


def _sum_in(
  y: jax.Array, name: str, dtype: str | None, route: str | Reduction = "psum"
) -> jax.Array:
  """All-reduces y in ``dtype`` (None: y's) and returns the sum in y's dtype.

  ``name`` is the mesh axis; ``route`` replaces ``lax.psum``, or is the key of
  such a function.
  """
  reduce = PROJECTION_ROUTES[route] if isinstance(route, str) else route
  sent = _cast_for_reduction(y, dtype)
  total = reduce(sent, name)
  if sent.dtype == y.dtype:
    return total
  # XLA:TPU would move the cast after the reduction to before it. A barrier
  # between them makes the reduction synchronous. Rounding the sum to the
  # narrower dtype first makes the cast exact, and XLA does not move it
  # (docs/methods.md).
  narrow = min(y.dtype, sent.dtype, key=lambda d: d.itemsize)
  bits = jnp.finfo(narrow)
  return lax.reduce_precision(total, bits.nexp, bits.nmant).astype(y.dtype)


def _cast_for_reduction(y: jax.Array, dtype: str | None) -> jax.Array:
  """Casts y to ``dtype``, the dtype of its reduction; None returns y.

  XLA:TPU moves casts through a reduction, to reduce in the narrower of the two
  dtypes. A barrier prevents that.
  """
  if dtype in (None, y.dtype.name):
    return y
  return lax.optimization_barrier(y.astype(dtype))


def cast_to_ranks(
  x: jax.Array, name: str, backward_dtype: str | None
) -> jax.Array:
  """Returns x as device-varying; the backward sums the ranks' cotangents.

  Args:
    x: Activations that are equal on all ranks.
    name: Mesh axis of the tensor ranks.
    backward_dtype: Dtype of the sum of cotangents; None for their dtype.
  """
  return _with_transpose(
    lambda x: varying(x, name), lambda g: _sum_in(g, name, backward_dtype), x
  )
