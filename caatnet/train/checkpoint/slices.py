"""Checkpoints of arrays larger than memory, written and read in slices.

The files have the format of `caatnet.train.checkpoint.save`. Orbax supports any
type of array that has a registered handler; the handler here never holds more
than one slice of an array.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import math
import os
import threading
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers
import tensorstore

from caatnet.train.checkpoint import checksums
from caatnet.train.checkpoint.row_sums import checksum_part, num_rows

# Position of a slice: its indices in the leading dims.
SliceIndex = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SlicedArray:
  """Array that is created slice by slice.

  Attributes:
    shape: The shape of the whole array.
    dtype: The dtype of the array and of all slices.
    chunk: The shape of a storage chunk, which is the unit of reading.
    slices: Function that returns an iterable of (position, slice); each slice
      is created when the iteration reaches it.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  chunk: tuple[int, ...]
  slices: Callable[[], Iterable[tuple[SliceIndex, np.ndarray]]]


class StoredArray:
  """Array of a checkpoint that is read slice by slice."""

  def __init__(self, store: tensorstore.TensorStore) -> None:
    self._store = store

  @property
  def shape(self) -> tuple[int, ...]:
    return self._store.shape

  @property
  def dtype(self) -> np.dtype:
    return self._store.dtype.numpy_dtype

  def rows(self, first: SliceIndex) -> Iterator[np.ndarray]:
    """Yields ``self[first][i]`` for all i, reading every chunk once.

    Args:
      first: Indices in the first dims of the array; i is the index in the next.
    """
    dim = len(first)
    step = self._store.chunk_layout.read_chunk.shape[dim]
    for start in range(0, self.shape[dim], step):
      stop = min(start + step, self.shape[dim])
      yield from self._store[first][start:stop].read().result()

  def at(self, place: SliceIndex) -> np.ndarray:
    """Reads the slice with the index ``place``."""
    return self._store[place].read().result()


class InMemoryArray:
  """Array in memory with the interface of `StoredArray`."""

  def __init__(self, values: np.ndarray) -> None:
    self._values = values

  @property
  def shape(self) -> tuple[int, ...]:
    return self._values.shape

  def rows(self, first: SliceIndex) -> Iterator[np.ndarray]:
    """Yields ``self[first][i]`` for all i."""
    yield from self._values[first]

  def at(self, place: SliceIndex) -> np.ndarray:
    """Returns the slice with the index ``place``."""
    return self._values[place]


def write_params(
  directory: str | os.PathLike[str], step: int, params: Any
) -> None:
  """Writes a checkpoint with parameters only, and their checksums.

  Args:
    directory: The folder of all checkpoints, which exists.
    step: The step of the checkpoint, which is its name.
    params: Tree of `SlicedArray`, ``[workers, ...]``.
  """
  handler = _Handler()
  path = epath.Path(os.path.abspath(os.path.join(directory, str(step))))
  try:
    with _checkpointer(handler) as checkpointer:
      checkpointer.save(
        path, args=ocp.args.Composite(params=ocp.args.PyTreeSave(params))
      )
    checksums.write(path, {"params": handler.sums})
  except BaseException:
    handler.stop()  # Ctrl-C interrupts this thread, not the writing thread
    raise


def open_params(
  directory: str | os.PathLike[str], step: int, names: Any
) -> Any:
  """Opens the parameters of a checkpoint.

  Args:
    directory: The folder of all checkpoints.
    step: The step of the checkpoint.
    names: Any tree with the structure of the parameters.

  Returns:
    The same tree with `StoredArray` leaves, ``[workers, ...]``.
  """
  args = jax.tree.map(
    lambda _: ocp.RestoreArgs(restore_type=SlicedArray), names
  )
  with _checkpointer(_Handler()) as checkpointer:
    return checkpointer.restore(
      os.path.abspath(os.path.join(directory, str(step))),
      args=ocp.args.Composite(
        params=ocp.args.PyTreeRestore(item=names, restore_args=args)
      ),
    ).params


def _checkpointer(handler: "_Handler") -> ocp.Checkpointer:
  """Returns an Orbax checkpointer that reads and writes in slices."""
  handlers = type_handlers.create_type_handler_registry((SlicedArray, handler))
  return ocp.Checkpointer(
    ocp.CompositeCheckpointHandler(
      params=ocp.PyTreeCheckpointHandler(type_handler_registry=handlers)
    )
  )


class _Handler(type_handlers.TypeHandler):
  """Orbax handler that writes `SlicedArray`s and opens `StoredArray`s.

  Attributes:
    sums: Checksums of the arrays that were written.
  """

  def __init__(self) -> None:
    self.sums: dict[str, Any] = {}
    self._stopping, self._idle = threading.Event(), threading.Event()
    self._idle.set()

  def stop(self) -> None:
    """Stops the writing thread after its current slice, and waits for it."""
    self._stopping.set()
    self._idle.wait()

  def typestr(self) -> str:
    # The checkpoint records it, so that any reader expects a numpy array.
    return "np.ndarray"

  async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
    raise NotImplementedError("metadata is read by the handler of np.ndarray")

  async def serialize(
    self,
    values: Sequence[SlicedArray],
    infos: Sequence[type_handlers.ParamInfo],
    args: Sequence[type_handlers.SaveArgs] | None = None,
  ) -> Sequence[Any]:
    """Starts a thread that waits until the folder exists, then writes."""
    self._idle.clear()
    writing = self._write(values, infos)
    return [
      ocp.future.CommitFutureAwaitingContractedSignals(writing, name="slices")
    ]

  async def _write(
    self,
    values: Sequence[SlicedArray],
    infos: Sequence[type_handlers.ParamInfo],
  ) -> None:
    """Writes all slices, one after another."""
    try:
      for value, info in zip(values, infos, strict=True):
        await info.await_path_creation()
        spec = type_handlers.get_json_tspec_write(
          info, use_ocdbt=True, global_shape=value.shape, dtype=value.dtype,
          local_shape=value.chunk, process_index=jax.process_index(),
        )
        store = await tensorstore.open(
          tensorstore.Spec(spec), create=True, context=info.ts_context
        )
        written, sums = 0, np.zeros(num_rows(value.shape), np.uint64)
        for place, part in value.slices():
          if self._stopping.is_set():
            return
          await store[place].write(part)
          written += part.size
          sums += checksum_part(
            part.reshape((1,) * len(place) + part.shape),
            (*place, *[0] * part.ndim), value.shape,
          )
        assert written == math.prod(value.shape), info.name
        self.sums[info.name] = str(value.dtype), checksums.hexes(sums)
    finally:
      self._idle.set()

  async def deserialize(
    self,
    infos: Sequence[type_handlers.ParamInfo],
    args: Sequence[type_handlers.RestoreArgs] | None = None,
  ) -> Sequence[StoredArray]:
    """Opens the arrays without reading their data."""
    specs = [
      type_handlers.get_json_tspec_read(info, use_ocdbt=True) for info in infos
    ]
    return [
      StoredArray(
        await tensorstore.open(
          tensorstore.Spec(spec), open=True, read=True,
          context=info.ts_context,
        )
      )
      for spec, info in zip(specs, infos, strict=True)
    ]
