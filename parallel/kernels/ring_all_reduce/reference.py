"""Ring all-reduce of the shared channels with add and norm: specification.

The rows of each device's partial sum are cut into 2 n chunks for n devices.
Chunk c of the first n goes up the ring (to device + 1), chunk c of the others
down. Reduce-scatter: chunk c starts at device c and is added up hop by hop,
``own + arrived``, rounded to the stream's dtype at each, until it has passed
all; all-gather: the sum goes around once more. Then ``add_norm``. Source of the
ring: Patarasuk and Yuan, JPDC 69, 2009.

Shape legend: n = devices, T = rows, K = shared channels, P = private channels.
"""

import jax
import jax.numpy as jnp

from parallel.kernels.add_norm import reference as add_norm


def ring_sum(partials: jax.Array) -> jax.Array:
  """What all devices hold after the ring.

  Args:
    partials: ``[n, T, K]``, every device's; 2 n divides T.

  Returns:
    ``[T, K]``, in their dtype.
  """
  n = partials.shape[0]
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
  """Of all devices at once; see ``api.ring_partial_all_reduce``.

  Args:
    shared: ``[T, K]``, equal on all devices.
    privates: ``[n, T, P]``.
    partials: ``[n, T, K]``, partial sums of the shared channels.
    d_privates: ``[n, T, P]``.
    gain: float32 ``[K + P]``.
    private_scale: Multiplies ``d_privates``.
    eps: Added to the mean square.

  Returns:
    Every device's new shared and private channels and normalised rows.
  """
  n = partials.shape[0]
  update = jnp.broadcast_to(ring_sum(partials), partials.shape)
  return add_norm.add_norm(
    jnp.broadcast_to(shared, (n, *shared.shape)), privates, update,
    d_privates, gain, private_scale=private_scale, eps=eps,
  )
