"""Any schedule of an all-reduce, from its table, over remote DMA.

The grid cuts the rows into segments that fit VMEM; each runs all rounds. What
arrives goes into two buffers in turn. A receiver tells the sender of each of
its messages when the buffer is free, two messages ahead, on a semaphore that
the sender has for this receiver alone: so a device with nothing to do may be
rounds ahead of others, and nothing is overwritten unread.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from parallel.kernels import calls
from parallel.kernels.schedule_all_reduce.reference import (
  ADD,
  OPERATION,
  RECEIVED,
  SEND_TO,
  SENT,
  num_chunks,
  senders,
)

# Columns that follow the table's own four.
_MINE, _THEIRS, _NEXT_SENDER = range(4, 7)


def refusal(
  num_rows: int, width: int, dtype: jnp.dtype, chunks: int
) -> str | None:
  """Why the kernel does not take an array; None: it does."""
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {dtype}: float32 or bfloat16"
  unit = chunks * (32 // jnp.dtype(dtype).itemsize)
  if num_rows < 1 or num_rows % unit:
    return f"{num_rows} rows: a multiple of {unit}, for chunks of whole tiles"
  if not _chunk_rows(num_rows, width, dtype, chunks):
    return f"{unit} rows do not fit {calls.VMEM_BYTES >> 20} MB"
  return None


def _chunk_rows(num_rows, width, dtype, chunks) -> int:
  """Rows of a chunk in a segment: the most that fit and divide; 0: none."""
  tile = 32 // jnp.dtype(dtype).itemsize
  per_chunk = num_rows // chunks
  # In and out, twice each, two buffers and a chunk in float32.
  row_bytes = width * ((4 * chunks + 3) * jnp.dtype(dtype).itemsize + 8)
  fitting = [
    rows
    for rows in range(tile, per_chunk + 1, tile)
    if rows * row_bytes <= calls.VMEM_BYTES and not per_chunk % rows
  ]
  return max(fitting, default=0)


def extended(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """What a device has to know beside its rows of the table.

  Args:
    table: ``[rounds, n, 4]``.

  Returns:
    ``[rounds, n, 7]``: the table, the buffer that this round's message arrives
    in, the one that it is sent to, and whose message after the next comes
    then (-1: nobody's); and ``[2, n]``: whose come first.
  """
  heard = senders(table)
  rounds, n = heard.shape
  out = np.full((rounds, n, 7), -1, np.int32)
  out[..., :4] = table
  first = np.full((2, n), -1, np.int32)
  for device in range(n):
    turns = np.flatnonzero(heard[:, device] >= 0)
    for index, turn in enumerate(turns):
      sender = heard[turn, device]
      out[turn, device, _MINE] = out[turn, sender, _THEIRS] = index % 2
      if index + 2 < len(turns):
        later = heard[turns[index + 2], device]
        out[turn, device, _NEXT_SENDER] = later
      if index < 2:
        first[index, device] = sender
  return out, first


def schedule_all_reduce(
  x: jax.Array,
  table: np.ndarray,
  *,
  axis_name: str,
  rows: int | None = None,
  interpret: bool = False,
  detect_races: bool = False,
) -> jax.Array:
  """See ``api.schedule_all_reduce``.

  Args:
    x: ``[T, K]``.
    table: ``[rounds, n, 4]``.
    axis_name: The mesh axis.
    rows: Of a chunk in a segment; None: as many as fit.
    interpret: Run on any machine.
    detect_races: Of the interpreter.
  """
  chunks, n = num_chunks(table), table.shape[1]
  rows = rows or _chunk_rows(*x.shape, x.dtype, chunks)
  segments = x.shape[0] // (chunks * rows)
  # Each segment is cut into all chunks: their order of summation is by segment.
  cut = x.reshape(segments, chunks, rows, x.shape[1])
  spec = pl.BlockSpec(
    (None, chunks, rows, x.shape[1]), lambda i: (i, 0, 0, 0)
  )
  whole, first = extended(table)
  numbers, device_id = calls.position(axis_name)
  here = numbers[0]
  smem = pl.BlockSpec(memory_space=pltpu.SMEM)
  params = {
    "compiler_params": pltpu.CompilerParams(
      dimension_semantics=("arbitrary",), collective_id=1,
      has_side_effects=True,
    ),
    "interpret": (
      pltpu.InterpretParams(detect_races=detect_races) if interpret else False
    ),
  }
  result = calls.shaped(cut.shape, x.dtype, cut)
  out = pl.pallas_call(
    functools.partial(_kernel, device_id=device_id, n=n),
    grid=(segments,),
    in_specs=[smem, smem, smem, spec],
    out_specs=spec,
    out_shape=result,
    scratch_shapes=[
      pltpu.VMEM((2, rows, x.shape[1]), x.dtype),
      pltpu.VMEM((rows, x.shape[1]), x.dtype),
      pltpu.SemaphoreType.DMA((2,)),
      pltpu.SemaphoreType.DMA,
      pltpu.SemaphoreType.REGULAR((n,)),
    ],
    name="schedule_all_reduce",
    metadata=calls.sends(
      axis_name, int((table[..., SEND_TO] >= 0).sum(axis=0).max()),
      x.size // chunks, x.dtype, [result],
    ),
    **params,
  )(
    numbers,
    jnp.asarray(whole)[:, here],
    jnp.asarray(first)[:, here],
    cut,
  )
  return out.reshape(x.shape)


def _kernel(
  here_ref, table_ref, first_ref, x_ref, out_ref,
  arrived_ref, sent_ref, arrive_sem, send_sem, ready_sem, *, device_id, n,
):
  here = here_ref[0]

  def signal(semaphore, device):
    pl.semaphore_signal(
      semaphore, 1, device_id=device_id(here_ref, device),
      device_id_type=pl.DeviceIdType.MESH,
    )

  def grant(sender):
    @pl.when(sender >= 0)
    def _():
      signal(ready_sem.at[here], sender)

  @pl.when(pl.program_id(0) == 0)
  def _():  # everyone is in the kernel before anything is sent
    barrier = pltpu.get_barrier_semaphore()
    for device in range(n):

      @pl.when(device != here)
      def _(device=device):
        signal(barrier, device)

    pl.semaphore_wait(barrier, n - 1)

  out_ref[...] = x_ref[...]
  grant(first_ref[0])
  grant(first_ref[1])

  def one_round(turn, _):
    to, sent = table_ref[turn, SEND_TO], table_ref[turn, SENT]
    received = table_ref[turn, RECEIVED]
    sends, receives = to >= 0, received >= 0

    def message(buffer, device):
      return pltpu.make_async_remote_copy(
        src_ref=sent_ref,
        dst_ref=arrived_ref.at[buffer],
        send_sem=send_sem,
        recv_sem=arrive_sem.at[buffer],
        device_id=device_id(here_ref, device),
        device_id_type=pl.DeviceIdType.MESH,
      )

    @pl.when(sends)
    def _():
      pl.semaphore_wait(ready_sem.at[to], 1)
      sent_ref[...] = out_ref[sent]  # which may be added to below
      message(table_ref[turn, _THEIRS], to).start()

    @pl.when(receives)
    def _():
      buffer = table_ref[turn, _MINE]
      message(buffer, here).wait_recv()

      @pl.when(table_ref[turn, OPERATION] == ADD)
      def _():
        old = out_ref[received].astype(jnp.float32)
        new = old + arrived_ref[buffer].astype(jnp.float32)
        out_ref[received] = new.astype(out_ref.dtype)

      @pl.when(table_ref[turn, OPERATION] != ADD)
      def _():
        out_ref[received] = arrived_ref[buffer]

      grant(table_ref[turn, _NEXT_SENDER])

    @pl.when(sends)
    def _():
      message(table_ref[turn, _THEIRS], to).wait_send()

    return 0

  lax.fori_loop(0, table_ref.shape[0], one_round, 0)
