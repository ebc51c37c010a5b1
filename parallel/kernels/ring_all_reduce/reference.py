"""Ring all-reduce of shared channels, with add and norm: the specification.

The rows of each device's partial sum are split into 2 n chunks for n devices.
The first n chunks travel up the ring (to device + 1) and the others down, which
uses both directions of the links. In the reduce-scatter, chunk c of either
direction starts at device c; each device adds its own chunk to the received
one, ``own + arrived``, rounded to the stream's dtype. In the all-gather the
sum travels around the ring a second time, unchanged. ``add_norm`` follows.

Source of the ring: Patarasuk and Yuan, JPDC 69, 2009. Using both directions
concurrently is an addition.

Shape legend: n = devices, T = rows, K = shared channels, P = private channels.
"""

import jax
import jax.numpy as jnp

from parallel.kernels.add_norm import reference as add_norm


def ring_sum(partials: jax.Array) -> jax.Array:
  """Returns the sum on all devices, with the ring's order of additions.

  Args:
    partials: Partial sums of all devices, ``[n, T, K]``; 2 n divides T.

  Returns:
    ``[T, K]``, in the dtype of ``partials``.

  Example:
    >>> partials = jnp.stack([jnp.ones((4, 1)), 2 * jnp.ones((4, 1))])
    >>> ring_sum(partials).ravel().tolist()
    [3.0, 3.0, 3.0, 3.0]
  """
  n = partials.shape[0]
  # [device, direction, chunk, rows of a chunk, K].
  chunks = partials.reshape(n, 2, n, -1, partials.shape[-1])
  sums = []
  for way, step in enumerate((1, -1)):
    for chunk in range(n):
      total = chunks[chunk, way, chunk]
      for hop in range(1, n):
        total = chunks[(chunk + step * hop) % n, way, chunk] + total
      sums.append(total)
  return jnp.concatenate(sums)


def ring_partial_all_reduce(
  shared: jax.Array,
  privates: jax.Array,
  partials: jax.Array,
  d_privates: jax.Array,
  gain: jax.Array,
  *,
  private_scale: float = 1.0,
  eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Implements `api.ring_partial_all_reduce`, for all devices in one array.

  ``shared`` is ``[T, K]`` and equal on all devices. The other operands and the
  results are stacked over devices, ``[n, T, ...]``; 2 n divides T.
  """
  n = partials.shape[0]
  update = jnp.broadcast_to(ring_sum(partials), partials.shape)
  return add_norm.add_norm(
    jnp.broadcast_to(shared, (n, *shared.shape)), privates, update,
    d_privates, gain, private_scale=private_scale, eps=eps,
  )
