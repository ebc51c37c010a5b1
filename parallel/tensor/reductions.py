"""How a row door sums over ranks, forward and backward.

A partial sum is reduced by a route of `parallel.collectives`, or by a kernel
that also adds the sum to the residual stream and normalises it. Whichever it
is, the transpose is not the route's own: the ranks' cotangents of the shared
channels are summed in a dtype of their own.

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
from parallel.kernels.calls import same_axes
from parallel.kernels.reduce_add_norm import api as one_shot
from parallel.kernels.ring_all_reduce import api as ring
from parallel.kernels.selection import Implementation
from parallel.routes import parts_of_all
from parallel.tensor.partial_sync import DOOR_ROUTES, PartialSync

# The name under which remat policies find what has been reduced.
REDUCED = "reduced"

# (shared [B, T, K], private [B, T, P], partial sums [B, T, K], update of the
# private channels [B, T, P], gain [H]) -> the new shared and private channels,
# and the normalised rows [B, T, H].
ReduceAddNorm = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def sum_over_ranks(
  y: jax.Array, name: str, sync: PartialSync
) -> jax.Array:
  """All-reduces each way: F on shared channels, and its transpose F^T.

  The result is device-varying by type (the ranks' cotangents of it differ)
  though equal in value.
  """
  if lax.axis_size(name) == 1:
    return checkpoint_name(varying(y, name), REDUCED)
  total = _with_transpose(
    lambda y: varying(_sum_in(y, name, sync.forward_dtype, sync.route), name),
    lambda g: varying(_sum_in(g, name, sync.backward_dtype, sync.route), name),
    y,
  )
  return checkpoint_name(total, REDUCED)


def kernel_of_norm(
  rows: tuple[int, ...],
  width: int,
  dtype: jnp.dtype,
  axis: Axis,
  sync: PartialSync,
  implementation: Implementation,
) -> Callable[[float], ReduceAddNorm] | None:
  """The route's kernel that sums, adds and normalises, for a rank's stream.

  "one_shot" gathers everyone's partial sums and adds them in the kernel;
  "ring_kernel" reduces in it. Backward the ranks' cotangents are summed by the
  route without the kernel.

  To rematerialise without reducing again, the new stream and the normalised
  rows are kept: 2 H channels, where `sum_over_ranks` alone keeps K.

  Args:
    rows: B, T.
    width: H.
    dtype: The stream's dtype.
    axis: The tensor axis.
    sync: What is shared, and how it is reduced.
    implementation: Kernels in order of preference, see
      `parallel.kernels.selection`.

  Returns:
    The kernel, given what is added to the mean square; None: the route has no
    kernel, or none takes the stream.

  Raises:
    ValueError: A dtype of the reduction that the kernel does not have.
  """
  k, sent = sync.num_shared(width), sync.forward_dtype
  shared, private = (
    jax.ShapeDtypeStruct((*rows, n), dtype) for n in (k, width - k)
  )
  if sync.route == "one_shot":
    parts = jax.ShapeDtypeStruct((axis.devices, *shared.shape), sent or dtype)
    chosen = one_shot.choice(shared, private, parts, None, implementation)
  elif sync.route == "ring_kernel":
    if sent not in (None, dtype.name):
      raise ValueError(
        f"forward_dtype={sent!r} must be '' or {dtype.name!r} with "
        "route='ring_kernel', which adds in the stream's dtype"
      )
    chosen = ring.choice(shared, private, axis.devices, implementation)
  else:
    return None
  if chosen.name == "reference":
    return None
  return functools.partial(_reduce_add_norm, axis, sync, implementation)


def _reduce_add_norm(
  axis: Axis, sync: PartialSync, implementation: Implementation, eps: float
) -> ReduceAddNorm:
  """The kernel of a route that has one, differentiable."""
  options = {
    "private_scale": sync.scale(axis), "eps": eps,
    "implementation": implementation,
  }

  def reduce_gathered(shared, private, partial, d_private, gain):
    parts = parts_of_all(_as_sent(partial, sync.forward_dtype), axis.name)
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
  """``reduce``, differentiated as a norm of the new stream.

  The cotangent of a rank's partial sum is that of the stream which it was
  added to, summed over ranks; the transpose of a gather would send all blocks.
  """
  differentiable = jax.custom_vjp(reduce)

  def forward(*operands):
    # Named here, where they become residuals.
    new = [checkpoint_name(x, REDUCED) for x in reduce(*operands)]
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
    return (
      d_shared, d_private, varying(total, axis.name), d_private * scale, d_gain
    )

  differentiable.defvjp(forward, backward)
  return lambda *operands: differentiable(*same_axes(*operands))


def _with_transpose(
  f: Callable[[jax.Array], jax.Array],
  transpose: Callable[[jax.Array], jax.Array],
  x: jax.Array,
) -> jax.Array:
  """``f(x)`` of a linear ``f`` whose transpose is given."""
  linear = jax.custom_vjp(f)
  linear.defvjp(lambda x: (f(x), None), lambda _, g: (transpose(g),))
  return linear(x)


def _sum_in(
  y: jax.Array, name: str, dtype: str | None, route: str | Reduction = "psum"
) -> jax.Array:
  """All-reduces in ``dtype``, in y's own if None; returns y's."""
  reduce = DOOR_ROUTES[route] if isinstance(route, str) else route
  sent = _as_sent(y, dtype)
  total = reduce(sent, name)
  if sent.dtype == y.dtype:
    return total
  # After the reduction a barrier would make it synchronous, but rounding to
  # the narrower dtype first leaves no cast to move (LOG.md).
  narrow = min(y.dtype, sent.dtype, key=lambda d: d.itemsize)
  bits = jnp.finfo(narrow)
  return lax.reduce_precision(total, bits.nexp, bits.nmant).astype(y.dtype)


def _as_sent(y: jax.Array, dtype: str | None) -> jax.Array:
  """``y`` in ``dtype``.

  XLA:TPU takes casts beside a reduction for free to move, and would reduce in
  the narrower of the two dtypes. A barrier keeps this one where it is.
  """
  if dtype in (None, y.dtype.name):
    return y
  return lax.optimization_barrier(y.astype(dtype))


def cast_to_ranks(
  x: jax.Array, name: str, backward_dtype: str | None
) -> jax.Array:
  """Identity; its transpose sums the ranks' cotangents, in one dtype."""
  return _with_transpose(
    lambda x: varying(x, name), lambda g: _sum_in(g, name, backward_dtype), x
  )
