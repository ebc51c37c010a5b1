"""Ring all-reduce over remote DMA, overlapped with residual add and norm.

The grid splits the rows into segments that fit in VMEM, and Pallas loads the
next segment during the all-reduce of the current one. In a segment 2 n chunks
of rows travel around the ring, n of them up and n down concurrently
(``reference.py``).

Buffers: in each direction, the messages of a device are numbered across the
reduce-scatter, the all-gather and all segments. Message t is written to buffer
t % 2 of the receiver. No unread message is overwritten, although receivers send
no acknowledgement. Proof: let device i + 1 be above device i. Before device i
sends message t + 2 up, it has waited for message t + 1 down from device i + 1.
Device i + 1 sent that message after it had read message t from below. The same
holds in the opposite direction. The proof requires that both directions proceed
hop by hop together.

Compute under the transfers: the updates of the private channels, which are not
communicated, are added during the n - 1 hops of the reduce-scatter. During each
hop of the all-gather, the rows whose sum arrived in the previous hop are added
to the stream and normalised.

Shape legend: n = devices, T = rows, K = shared channels, P = private channels.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.add_norm.tpu import write_normed

# The directions of the ring: to device + 1 and to device - 1.
_UP, _DOWN = 0, 1

# Maximum VMEM bytes of a segment, and of the kernel with the compiler's
# temporaries. A segment has one chunk per device and direction, which needs
# more than the default limit of 16 MB on a v5e; v5e, v5p and v6e have >= 64 MB.
_MAX_SEGMENT_BYTES = 24 << 20
_VMEM_LIMIT_BYTES = 48 << 20


def refusal(
  num_rows: int, shared: int, private: int, dtype: jnp.dtype, devices: int
) -> str | None:
  """Returns the reason why operands are not supported, or None if they are.

  Args:
    num_rows: Number of rows (tokens), T.
    shared: Shared channels per row, K.
    private: Private channels per row, P.
    dtype: Dtype of the stream and of the partial sums.
    devices: Number of devices of the ring, n.
  """
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {dtype}: float32 or bfloat16"
  if devices < 2:
    return "one device: nothing to reduce"
  if not shared or not private:
    return "no shared or no private channels"
  unit = 2 * devices * _tile_rows(dtype)
  if num_rows % unit:
    return f"{num_rows} rows: a multiple of {unit}, for chunks of whole tiles"
  if not chunk_rows(num_rows, shared, private, dtype, devices):
    return f"{unit} rows do not fit {_MAX_SEGMENT_BYTES >> 20} MB"
  return None


def _tile_rows(dtype: jnp.dtype) -> int:
  """Returns the rows of a TPU tile: 8 for 4-byte, 16 for 2-byte elements."""
  return 32 // jnp.dtype(dtype).itemsize


def chunk_rows(
  num_rows: int, shared: int, private: int, dtype: jnp.dtype, devices: int
) -> int:
  """Returns the number of rows of one message, or 0 if none is possible.

  The result is the largest number of whole tiles of rows for which a segment
  fits in VMEM and segments divide the rows.

  Args:
    num_rows: Number of rows, T.
    shared: Shared channels per row, K.
    private: Private channels per row, P.
    dtype: Dtype of the stream and of the partial sums.
    devices: Number of devices of the ring, n.
  """
  size = jnp.dtype(dtype).itemsize
  # VMEM bytes per row of a segment of 2 n chunks. Four arrays (old stream,
  # update, new stream, normalised rows) are double-buffered: the next segment
  # is loaded while the current one is processed. 2 K elements per row suffice
  # for the 6 message buffers of one chunk with K channels each. The last term
  # is for four float32 arrays of the chunk that is processed.
  row_bytes = size * (2 * (4 * (shared + private)) + 2 * shared)
  row_bytes += 2 * 4 * (shared + private) // devices
  per_device = num_rows // (2 * devices)
  best = 0
  for rows in range(_tile_rows(dtype), per_device + 1, _tile_rows(dtype)):
    fits = 2 * devices * rows * row_bytes <= _MAX_SEGMENT_BYTES
    if fits and not per_device % rows:
      best = rows
  return best


def ring_partial_all_reduce(
  shared: jax.Array,
  private: jax.Array,
  partial: jax.Array,
  d_private: jax.Array,
  gain: jax.Array,
  *,
  axis_name: str,
  private_scale: float,
  eps: float,
  rows: int | None = None,
  interpret: bool = False,
  detect_races: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Runs `api.ring_partial_all_reduce` on rows: operands ``[T, ...]``.

  Additional args:
    rows: Rows of one message; None for the maximum that fits in VMEM.
    interpret: Whether to run in the interpreter, on any machine.
    detect_races: Whether the interpreter detects races.
  """
  (num_rows, k), p, dtype = shared.shape, private.shape[1], shared.dtype
  n = lax.axis_size(axis_name)
  rows = rows or chunk_rows(num_rows, k, p, dtype, n)
  segments = num_rows // (2 * n * rows)

  def cut(x):  # [segments, 2 n chunks, rows, channels]; n chunks per direction
    return x.reshape(segments, 2 * n, rows, x.shape[-1])

  def spec(width):
    return pl.BlockSpec((None, 2 * n, rows, width), lambda i: (i, 0, 0, 0))

  def shape(width):
    return calls.output_type((segments, 2 * n, rows, width), dtype, partial)

  numbers, device_id = calls.device_addressing(axis_name)
  out = calls.tpu_call(
    functools.partial(
      _kernel, device_id=device_id, n=n, scale=private_scale, eps=eps
    ),
    "arbitrary",
    grid=(segments,),
    in_specs=[
      pl.BlockSpec(memory_space=pltpu.SMEM),
      spec(k), spec(p), spec(k), spec(p),
      pl.BlockSpec((1, k + p), lambda i: (0, 0)),
    ],
    out_specs=[spec(k), spec(p), spec(k + p)],
    out_shape=[shape(k), shape(p), shape(k + p)],
    scratch_shapes=[
      pltpu.VMEM((2, 2, rows, k), dtype),  # [up/down, buffer]: received
      # [up/down]: message to send. Mosaic rejects a DMA from an operand's
      # block, which has a squeezed dim.
      pltpu.VMEM((2, rows, k), dtype),
      pltpu.SemaphoreType.DMA((2, 2)),  # [up/down, buffer]: it has arrived
      pltpu.SemaphoreType.DMA((2,)),  # [up/down]: it has been sent
    ],
    name="ring_partial_all_reduce",
    sends=calls.KernelSends(
      axis_name, 4 * (n - 1), partial.size // (2 * n), partial.dtype
    ),
    interpret=interpret,
    detect_races=detect_races,
    vmem_limit_bytes=_VMEM_LIMIT_BYTES,
  )(
    numbers,
    cut(shared), cut(private), cut(partial), cut(d_private), gain[None],
  )
  return tuple(x.reshape(num_rows, x.shape[-1]) for x in out)


def _kernel(
  here_ref, shared_ref, private_ref, partial_ref, d_private_ref, gain_ref,
  new_shared_ref, new_private_ref, normed_ref,
  arrived_ref, sent_ref, arrive_sem, send_sem,
  *, device_id, n, scale, eps,
):
  here = here_ref[0]
  hops = 2 * (n - 1)  # n - 1 of the reduce-scatter, n - 1 of the all-gather
  to = lax.rem(here + 1, n), lax.rem(here + n - 1, n)  # [up/down]: receiver

  # A message may only be sent to a device that has entered this kernel; before,
  # its VMEM and semaphores belong to other operations. Therefore each device
  # signals both neighbours once, in the first segment, and waits for two
  # signals. In a ring of two, both are from the same neighbour.
  @pl.when(pl.program_id(0) == 0)
  def _():
    barrier = pltpu.get_barrier_semaphore()
    for neighbour in to:
      pl.semaphore_signal(
        barrier, 1, device_id=device_id(here_ref, neighbour),
        device_id_type=pl.DeviceIdType.MESH,
      )
    pl.semaphore_wait(barrier, 2)

  def message(way, hop):
    # Messages alternate between buffers; a segment has an even number of hops.
    buffer = hop % 2
    return buffer, pltpu.make_async_remote_copy(
      src_ref=sent_ref.at[way],
      dst_ref=arrived_ref.at[way, buffer],
      send_sem=send_sem.at[way],
      recv_sem=arrive_sem.at[way, buffer],
      device_id=device_id(here_ref, to[way]),
      device_id_type=pl.DeviceIdType.MESH,
    )

  def chunk_at(way, hop):
    """Returns the number of the chunk that arrives in a hop, up or down.

    A device starts with the chunk of its own number. A chunk that arrives in
    hop h started h + 1 devices below (up direction) or above (down direction).
    2 n is added because the remainder of a negative number is negative.
    """
    step = -1 if way == _UP else 1
    return way * n + lax.rem(here + step * (hop + 1) + 2 * n, n)

  finish = functools.partial(
    _add_and_normalize, shared_ref=shared_ref, new_shared_ref=new_shared_ref,
    new_private_ref=new_private_ref, normed_ref=normed_ref,
    gain_ref=gain_ref, eps=eps,
  )
  for way in (_UP, _DOWN):
    sent_ref[way] = partial_ref[way * n + here]
  for hop in range(hops):
    under_way = []
    for way in (_UP, _DOWN):
      buffer, copy = message(way, hop)
      copy.start()
      under_way.append((way, buffer, copy))
    # Compute under the transfers. The transfers only read the buffers that are
    # read here, including sent_ref.
    if hop < n - 1:
      _add_private(
        hop, n, private_ref, d_private_ref, new_private_ref, scale
      )
    else:
      # The chunks completed in the previous hop, which are being forwarded.
      for way in (_UP, _DOWN):
        finish(chunk_at(way, hop - 1), sent_ref[way])
    for way, buffer, copy in under_way:
      # Waits until sent_ref, which is written below, has been sent, and until
      # the message from the other neighbour has arrived.
      copy.wait()
      arrived = arrived_ref[way, buffer]
      if hop < n - 1:
        own = partial_ref[chunk_at(way, hop)]
        sent_ref[way] = _sum(own, arrived)
      else:
        sent_ref[way] = arrived
  # Chunks that arrive in the last hop are complete everywhere: not forwarded.
  for way in (_UP, _DOWN):
    finish(chunk_at(way, hops - 1), sent_ref[way])


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
  """Adds in float32 and rounds: bitwise equal to a sum in bfloat16."""
  wide = a.astype(jnp.float32) + b.astype(jnp.float32)
  return wide.astype(a.dtype)


def _add_private(
  hop, n, private_ref, d_private_ref, new_private_ref, scale
):
  """Adds the updates ``d_private_ref``, times ``scale``, to private channels.

  The n - 1 hops of the reduce-scatter each add them to an equal part of the
  chunks of rows; this is the part of ``hop``.

  All private channels are updated before the all-gather, which normalises whole
  rows.
  """
  hops = n - 1
  for chunk in range(2 * n * hop // hops, 2 * n * (hop + 1) // hops):
    d = d_private_ref[chunk]
    d = calls.scaled(d.astype(jnp.float32), scale, d.dtype).astype(d.dtype)
    new_private_ref[chunk] = _sum(private_ref[chunk], d)


def _add_and_normalize(
  chunk, update, *, shared_ref, new_shared_ref, new_private_ref, normed_ref,
  gain_ref, eps,
):
  """Adds an all-reduced chunk to the residual stream, and normalises it.

  ``chunk`` is the number of the chunk of rows, and ``update`` the sum of its
  shared channels over ranks.
  """
  new_shared_ref[chunk] = _sum(shared_ref[chunk], update)
  wide = [
    ref[chunk].astype(jnp.float32) for ref in (new_shared_ref, new_private_ref)
  ]
  write_normed(normed_ref.at[chunk], wide, gain_ref, eps)
