"""Ring all-reduce over remote DMA, with add and norm under the transfers.

The grid cuts the rows into segments that fit VMEM; Pallas loads the next one
while this one's ring turns. In a segment 2 n chunks of rows go around, half of
them each way at once (``reference.py``). A way is a stream of messages numbered
through reduce-scatter, all-gather and all segments; message t goes into buffer
t % 2 of the receiver. Two buffers need no credits: a device sends message t + 2
up after it has received t + 1 from above, which was sent after its sender had
read t. The same holds downwards.

While reduce-scatter messages are under way the private channels of one chunk of
rows per hop are added; while all-gather messages are, the rows that arrived
before are added and normalised.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from parallel.kernels import calls
from parallel.kernels.add_norm.tpu import write_normed

_UP, _DOWN = 0, 1

# A segment is a chunk of rows per device and way, so it needs more VMEM than a
# v5e gives by default; v5e, v5p and v6e have 64 MB or more.
_BUDGET = 24 << 20
_LIMIT = 48 << 20


def refusal(
  num_rows: int, shared: int, private: int, dtype: jnp.dtype, devices: int
) -> str | None:
  """Why the kernel does not take operands; None: it does."""
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {dtype}: float32 or bfloat16"
  if devices < 2:
    return "one device: nothing to reduce"
  if not shared or not private:
    return "no shared or no private channels"
  unit = 2 * devices * _tile(dtype)
  if num_rows % unit:
    return f"{num_rows} rows: a multiple of {unit}, for chunks of whole tiles"
  if not chunk_rows(num_rows, shared, private, dtype, devices):
    return f"{unit} rows do not fit {_BUDGET >> 20} MB"
  return None


def _tile(dtype: jnp.dtype) -> int:
  return 32 // jnp.dtype(dtype).itemsize


def chunk_rows(
  num_rows: int, shared: int, private: int, dtype: jnp.dtype, devices: int
) -> int:
  """Rows of a chunk: the most that fit and divide; 0: none."""
  size = jnp.dtype(dtype).itemsize
  # Four streams and the partial sum, twice each; float32 values of a chunk.
  row_bytes = size * (2 * (4 * (shared + private)) + 2 * shared)
  row_bytes += 2 * 4 * (shared + private) // devices
  per_device = num_rows // (2 * devices)
  best = 0
  for rows in range(_tile(dtype), per_device + 1, _tile(dtype)):
    fits = 2 * devices * rows * row_bytes <= _BUDGET
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
  """See ``api.ring_partial_all_reduce``; rows ``[T, ...]``.

  Args:
    shared: ``[T, K]``.
    private: ``[T, P]``.
    partial: ``[T, K]``.
    d_private: ``[T, P]``.
    gain: ``[K + P]``.
    axis_name: The mesh axis.
    private_scale: Of ``d_private``, in the stream's dtype.
    eps: Added to the mean square.
    rows: Of a chunk; None: as many as fit.
    interpret: Run on any machine.
    detect_races: Of the interpreter.

  Returns:
    New shared and private channels, normalised rows.
  """
  (num_rows, k), p, dtype = shared.shape, private.shape[1], shared.dtype
  n = lax.axis_size(axis_name)
  rows = rows or chunk_rows(num_rows, k, p, dtype, n)
  segments = num_rows // (2 * n * rows)

  # A segment has chunk c of each device's share, of both ways.
  def cut(x):
    return x.reshape(segments, 2 * n, rows, x.shape[-1])

  def spec(width):
    return pl.BlockSpec((None, 2 * n, rows, width), lambda i: (i, 0, 0, 0))

  def shape(width):
    return calls.shaped((segments, 2 * n, rows, width), dtype, partial)

  params = calls.tpu_params(interpret, "arbitrary")
  if interpret:
    params["interpret"] = pltpu.InterpretParams(detect_races=detect_races)
  params["compiler_params"] = pltpu.CompilerParams(
    dimension_semantics=("arbitrary",),
    collective_id=0,
    has_side_effects=True,
    vmem_limit_bytes=_LIMIT,
  )
  results = [shape(k), shape(p), shape(k + p)]
  numbers, device_id = calls.position(axis_name)
  out = pl.pallas_call(
    functools.partial(
      _kernel, device_id=device_id, n=n, scale=private_scale, eps=eps
    ),
    grid=(segments,),
    in_specs=[
      pl.BlockSpec(memory_space=pltpu.SMEM),
      spec(k), spec(p), spec(k), spec(p),
      pl.BlockSpec((1, k + p), lambda i: (0, 0)),
    ],
    out_specs=[spec(k), spec(p), spec(k + p)],
    out_shape=results,
    scratch_shapes=[
      pltpu.VMEM((2, 2, rows, k), dtype),  # way, buffer: what arrives
      pltpu.VMEM((2, rows, k), dtype),  # way: what is sent
      pltpu.SemaphoreType.DMA((2, 2)),
      pltpu.SemaphoreType.DMA((2,)),
    ],
    name="ring_partial_all_reduce",
    metadata=calls.sends(
      axis_name, 4 * (n - 1), partial.size // (2 * n), partial.dtype, results
    ),
    **params,
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
  hops = 2 * (n - 1)
  to = lax.rem(here + 1, n), lax.rem(here + n - 1, n)  # each way

  @pl.when(pl.program_id(0) == 0)
  def _():  # both neighbours are in the kernel before anything is sent
    barrier = pltpu.get_barrier_semaphore()
    for neighbour in to:
      pl.semaphore_signal(
        barrier, 1, device_id=device_id(here_ref, neighbour),
        device_id_type=pl.DeviceIdType.MESH,
      )
    pl.semaphore_wait(barrier, 2)

  def message(way, hop):
    buffer = hop % 2  # the number of hops in a segment is even
    return buffer, pltpu.make_async_remote_copy(
      src_ref=sent_ref.at[way],
      dst_ref=arrived_ref.at[way, buffer],
      send_sem=send_sem.at[way],
      recv_sem=arrive_sem.at[way, buffer],
      device_id=device_id(here_ref, to[way]),
      device_id_type=pl.DeviceIdType.MESH,
    )

  def chunk_at(way, hop):
    """Which chunk arrives with a hop's message."""
    step = -1 if way == _UP else 1
    return way * n + lax.rem(here + step * (hop + 1) + 2 * n, n)

  finish = functools.partial(
    _finish, shared_ref=shared_ref, new_shared_ref=new_shared_ref,
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
    # Under the transfers.
    if hop < n - 1:
      _add_private(
        hop, n, private_ref, d_private_ref, new_private_ref, scale
      )
    else:
      for way in (_UP, _DOWN):  # what was complete before this hop
        finish(chunk_at(way, hop - 1), sent_ref[way])
    for way, buffer, copy in under_way:
      copy.wait()
      arrived = arrived_ref[way, buffer]
      if hop < n - 1:
        own = partial_ref[chunk_at(way, hop)]
        sent_ref[way] = _sum(own, arrived)
      else:
        sent_ref[way] = arrived
  for way in (_UP, _DOWN):
    finish(chunk_at(way, hops - 1), sent_ref[way])


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
  """In float32, rounded: for two bfloat16s what a bfloat16 sum is."""
  wide = a.astype(jnp.float32) + b.astype(jnp.float32)
  return wide.astype(a.dtype)


def _add_private(
  hop, n, private_ref, d_private_ref, new_private_ref, scale
):
  """A share of the chunks in each hop of the reduce-scatter."""
  hops = n - 1
  for chunk in range(2 * n * hop // hops, 2 * n * (hop + 1) // hops):
    d = d_private_ref[chunk]
    d = calls.scaled(d.astype(jnp.float32), scale, d.dtype).astype(d.dtype)
    new_private_ref[chunk] = _sum(private_ref[chunk], d)


def _finish(
  chunk, update, *, shared_ref, new_shared_ref, new_private_ref, normed_ref,
  gain_ref, eps,
):
  """Adds and normalises a chunk of rows whose sum is complete."""
  new_shared_ref[chunk] = _sum(shared_ref[chunk], update)
  wide = [
    ref[chunk].astype(jnp.float32) for ref in (new_shared_ref, new_private_ref)
  ]
  write_normed(normed_ref.at[chunk], wide, gain_ref, eps)
