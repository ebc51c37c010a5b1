"""All-reduce by an arbitrary schedule's table, over remote DMA.

The grid splits the rows into segments that fit in VMEM, and each segment
executes all rounds of the table.

Devices are not synchronised between rounds: an idle device proceeds to the next
round, and may be several rounds ahead of others. A handshake ensures a free
buffer at the receiver of each message:

  - Received messages alternate between two buffers of the receiver.
  - At the start of a segment both buffers are free. The device grants them to
    the senders of its first two messages; after it has read message m, it
    grants the buffer of m to the sender of message m + 2.
  - A grant is a signal on a semaphore of the sender. A sender has one semaphore
    per receiver, which separates the grants of different receivers, and waits
    for a grant before each message.

Every grant matches one message, so that all semaphores are zero at the end of a
segment.

Shape legend: n = devices, C = chunks of rows, T = rows, K = channels.
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
  RECEIVED_CHUNK,
  SEND_TO,
  SENT_CHUNK,
  num_chunks,
  senders,
)

# Columns that `add_handshake_columns` appends to the four columns of a table.
_OWN_BUFFER, _RECEIVER_BUFFER, _NEXT_SENDER = range(4, 7)


def refusal(
  num_rows: int, width: int, dtype: jnp.dtype, chunks: int
) -> str | None:
  """Returns the reason why an array is not supported, or None if it is.

  Args:
    num_rows: Number of rows, T.
    width: Channels per row, K.
    dtype: Dtype of the array.
    chunks: Number of chunks of the table, C.
  """
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f"dtype {dtype}: float32 or bfloat16"
  unit = chunks * (32 // jnp.dtype(dtype).itemsize)
  if num_rows < 1 or num_rows % unit:
    return f"{num_rows} rows: a multiple of {unit}, for chunks of whole tiles"
  if not _chunk_rows(num_rows, width, dtype, chunks):
    return f"{unit} rows do not fit {calls.MAX_BLOCK_VMEM_BYTES >> 20} MB"
  return None


def _chunk_rows(num_rows, width, dtype, chunks) -> int:
  """Returns the number of rows of one message, or 0 if none is possible.

  Arguments are those of `refusal`.

  The result is the largest number of whole tiles of rows for which a segment
  fits in VMEM and segments divide the rows.
  """
  tile = 32 // jnp.dtype(dtype).itemsize
  per_chunk = num_rows // chunks
  # All C chunks of operand and result are double-buffered: the next segment is
  # loaded while the current one is processed. One chunk each: two receive
  # buffers, the send buffer, and both summands in float32.
  row_bytes = width * ((4 * chunks + 3) * jnp.dtype(dtype).itemsize + 8)
  fitting = [
    rows
    for rows in range(tile, per_chunk + 1, tile)
    if rows * row_bytes <= calls.MAX_BLOCK_VMEM_BYTES and not per_chunk % rows
  ]
  return max(fitting, default=0)


def add_handshake_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Appends to a table the columns of the handshake.

  Args:
    table: int32 ``[rounds, n, 4]``.

  Returns:
    A pair of arrays, in which -1 means none:

    - int32 ``[rounds, n, 7]``: the four columns of the table; the device's
      buffer in which the message of this round arrives; the receiver's buffer
      to which the message of this round is sent; and the device to which the
      device's buffer is granted after reading, the sender of the message after
      the next.
    - int32 ``[2, n]``: the senders of a device's first two messages.
  """
  sender_of = senders(table)
  rounds, n = sender_of.shape
  out = np.full((rounds, n, 7), -1, np.int32)
  out[..., :4] = table
  first = np.full((2, n), -1, np.int32)
  for device in range(n):
    turns = np.flatnonzero(sender_of[:, device] >= 0)
    for index, turn in enumerate(turns):
      sender = sender_of[turn, device]
      out[turn, device, _OWN_BUFFER] = out[
        turn, sender, _RECEIVER_BUFFER
      ] = index % 2
      if index + 2 < len(turns):
        later = sender_of[turns[index + 2], device]
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
  """Runs `api.schedule_all_reduce` on rows ``[T, K]``.

  Additional args:
    rows: Rows of one message; None for the maximum that fits in VMEM.
    interpret: Whether to run in the interpreter, on any machine.
    detect_races: Whether the interpreter detects races.
  """
  chunks, n = num_chunks(table), table.shape[1]
  rows = rows or _chunk_rows(*x.shape, x.dtype, chunks)
  segments = x.shape[0] // (chunks * rows)
  # [segments, C, rows, K]: a segment has rows of all C chunks, so that it can
  # execute all rounds. The chunk of a row, and thus the order of its additions,
  # depends on its position in its segment.
  cut = x.reshape(segments, chunks, rows, x.shape[1])
  spec = pl.BlockSpec(
    (None, chunks, rows, x.shape[1]), lambda i: (i, 0, 0, 0)
  )
  whole, first = add_handshake_columns(table)
  numbers, device_id = calls.device_addressing(axis_name)
  here = numbers[0]
  smem = pl.BlockSpec(memory_space=pltpu.SMEM)
  out = calls.tpu_call(
    functools.partial(_kernel, device_id=device_id, n=n),
    "arbitrary",  # segments run in order
    grid=(segments,),
    in_specs=[smem, smem, smem, spec],
    out_specs=spec,
    out_shape=calls.output_type(cut.shape, x.dtype, cut),
    scratch_shapes=[
      pltpu.VMEM((2, rows, x.shape[1]), x.dtype),  # [buffer]: received message
      pltpu.VMEM((rows, x.shape[1]), x.dtype),  # message to send
      pltpu.SemaphoreType.DMA((2,)),  # [buffer]: a message has arrived
      pltpu.SemaphoreType.DMA,  # the message has been sent
      pltpu.SemaphoreType.REGULAR((n,)),  # [receiver]: grants to this device
    ],
    name="schedule_all_reduce",
    sends=calls.KernelSends(
      axis_name, int((table[..., SEND_TO] >= 0).sum(axis=0).max()),
      x.size // chunks, x.dtype,
    ),
    interpret=interpret,
    detect_races=detect_races,
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
    """Signals to a sender that it may send one more message to this device."""
    @pl.when(sender >= 0)
    def _():
      signal(ready_sem.at[here], sender)

  @pl.when(pl.program_id(0) == 0)
  def _():
    # Signals and messages may only be sent to a device that has entered this
    # kernel. A table may contain any pair of devices, so all wait for all.
    barrier = pltpu.get_barrier_semaphore()
    for device in range(n):

      @pl.when(device != here)
      def _(device=device):
        signal(barrier, device)

    pl.semaphore_wait(barrier, n - 1)

  # The rounds update the result in place. Both buffers are free: the previous
  # segment has read all of its messages.
  out_ref[...] = x_ref[...]
  grant(first_ref[0])
  grant(first_ref[1])

  def one_round(turn, _):
    to, sent = table_ref[turn, SEND_TO], table_ref[turn, SENT_CHUNK]
    received = table_ref[turn, RECEIVED_CHUNK]
    sends, receives = to >= 0, received >= 0

    def message(buffer, device):
      # The same descriptor serves to wait for a message, for which only the
      # semaphore and the size matter.
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
      # A copy, since the chunk may be modified below while the message is sent.
      # In addition, Mosaic rejects a DMA from a block with a squeezed dim.
      sent_ref[...] = out_ref[sent]
      message(table_ref[turn, _RECEIVER_BUFFER], to).start()

    @pl.when(receives)
    def _():
      buffer = table_ref[turn, _OWN_BUFFER]
      message(buffer, here).wait_recv()

      # Added in float32 and rounded: bitwise equal to a sum in bfloat16.
      @pl.when(table_ref[turn, OPERATION] == ADD)
      def _():
        old = out_ref[received].astype(jnp.float32)
        new = old + arrived_ref[buffer].astype(jnp.float32)
        out_ref[received] = new.astype(out_ref.dtype)

      @pl.when(table_ref[turn, OPERATION] != ADD)
      def _():
        out_ref[received] = arrived_ref[buffer]

      grant(table_ref[turn, _NEXT_SENDER])  # the buffer has been read

    # The next round overwrites sent_ref.
    @pl.when(sends)
    def _():
      message(table_ref[turn, _RECEIVER_BUFFER], to).wait_send()

    return 0

  lax.fori_loop(0, table_ref.shape[0], one_round, 0)
