"""Ring all-reduce of shared channels, with add and norm: the specification.

The rows of each device's partial sum are cut into 2 n chunks for n devices. The
first n chunks go up the ring (to device + 1) and the others down, so that links
carry both directions at once. In the reduce-scatter chunk c of either direction
starts at device c. Each device that it reaches adds its own chunk, ``own +
arrived``, rounded to the stream's dtype, until all have. In the all-gather the
sum goes around once more, unchanged. Then comes ``add_norm``.

Source of the ring: Patarasuk and Yuan, JPDC 69, 2009. Both directions at once
are an addition.

Shape legend: n = devices, T = rows, K = shared channels, P = private channels.
"""

import jax
import jax.numpy as jnp

from parallel.kernels.add_norm import reference as add_norm


def ring_sum(partials: jax.Array) -> jax.Array:
  """Returns the sum that all devices hold after the ring.

  Args:
    partials: Every device's partial sum, ``[n, T, K]``; 2 n divides T.

  Returns:
    ``[T, K]``, in the dtype of ``partials``.
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
  """Specifies `api.ring_partial_all_reduce`, for all devices on one of them.

  ``shared`` is ``[T, K]`` and equal on all devices. The other operands and the
  results are stacked over devices, ``[n, T, ...]``; 2 n divides T.
  """
  n = partials.shape[0]
  update = jnp.broadcast_to(ring_sum(partials), partials.shape)
  return add_norm.add_norm(
    jnp.broadcast_to(shared, (n, *shared.shape)), privates, update,
    d_privates, gain, private_scale=private_scale, eps=eps,
  )
