"""Asynchronous, atomic checkpoints in logical shape.

A parameter's array contains all workers and tensor ranks and is whole,
independent of the mesh and partition that wrote it. So a run can resume on
other meshes and with other partitions. Parameters and the outer loop's state
are separate items, which an evaluation reads without the optimizer's state. All
arrays have checksums, which every reader verifies (`checksums`).
"""

import asyncio
from collections.abc import Iterable, Iterator
import contextlib
import os
import sys
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from caatnet.program import Program
from caatnet.train.checkpoint import checksums, slices
from caatnet.train.checkpoint.reshard import to_stored, to_whole
from caatnet.train.state import TrainState
from parallel.base import files


class Checkpointer:
  """Reader and writer of the checkpoints of one run."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    program: Program,
    keep: int | None = None,
  ) -> None:
    """Opens ``workdir/checkpoints``, which may not exist yet.

    Args:
      workdir: The run's folder.
      program: The model on a mesh, which defines the stored layout.
      keep: The number of newest checkpoints to keep. None for read-only access,
        which is safe while another process writes.
    """
    self._program = program
    self.directory = files.parse_folder(workdir) / "checkpoints"
    if not files.is_cloud(self.directory):
      self.directory = self.directory.absolute()
    self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    self._manager, self._opened = None, contextlib.ExitStack()
    if keep is not None:
      # A thread of Orbax writes while the run continues.
      self._opened.enter_context(waiting_for_arrays())
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=keep, cleanup_tmp_directories=True
        ),
      )

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, in ascending order."""
    return sorted(ocp.utils.checkpoint_steps(self.directory))

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint; None if none."""
    return max(self.steps(), default=None)

  def num_workers(self, step: int | None = None) -> int:
    """Returns the number of workers in a step's checkpoint (None: newest)."""
    step = self._resolve_step(None) if step is None else step
    with self._open_for_reading(step, ["params"]) as path:
      params = ocp.StandardCheckpointHandler().metadata(path / "params")
    return jax.tree.leaves(params)[0].shape[0]

  def path(self, step: int | None) -> str:
    """Returns a checkpoint's path for messages; "none yet" for None."""
    return "none yet" if step is None else str(self.directory / str(step))

  def save(self, state: TrainState, position: dict[str, Any]) -> None:
    """Starts to write a checkpoint; the state may be donated afterwards.

    Args:
      state: The training state; its step is the name of the checkpoint.
      position: The position of the data iterator, as plain data.
    """
    step = int(state.step)
    if step in self._manager.all_steps():  # a run that stops just after a save
      return
    state = to_whole(self._program, state)
    trees = _all_items(state)
    sums: dict[str, Any] = {k: checksums.of_tree(x) for k, x in trees.items()}
    sums["position"] = checksums.of_json(position)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{name: ocp.args.StandardSave(x) for name, x in trees.items()},
        position=ocp.args.JsonSave(position),
        **{checksums.ITEM: ocp.args.JsonSave(sums)},
      ),
    )

  def restore(
    self, abstract: TrainState, step: int | None = None
  ) -> tuple[TrainState, dict[str, Any]]:
    """Reads a training state onto the mesh of ``abstract``.

    If the number of workers differs from the checkpoint's, surplus workers are
    dropped and new workers have zeros (`caatnet.train.elastic.membership`).

    Args:
      abstract: Shapes and shardings of the result.
      step: The step of the checkpoint; None for the newest one.

    Returns:
      The state, and the position of the data iterator.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      ValueError: If it is damaged, or does not match ``abstract``.
    """
    step = self._resolve_step(step)
    # Whole arrays are read, sharded over devices, and then cut into shards.
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    abstract = to_whole(self._program, abstract)
    read = self._read(
      step, _all_items(abstract), position=ocp.args.JsonRestore()
    )
    state = TrainState(
      step=read.rest["step"],
      params=read.params,
      opt_state=read.rest["opt_state"],
      outer=read["outer"] if abstract.outer else abstract.outer,
      key=read.rest["key"],
    )
    return to_stored(self._program, state, shardings), read.position

  def restore_params(
    self, params: Any, outer: Any, step: int | None = None
  ) -> tuple[Any, Any, int, int]:
    """Reads parameters and the outer loop's state, for an evaluation.

    A trainer may be running concurrently. If it deletes the newest checkpoint
    during the read, its newest one is read instead.

    Args:
      params: Shapes and shardings of the workers' parameters.
      outer: Shapes and shardings of the outer loop's state.
      step: The step of the checkpoint; None for the newest one.

    Returns:
      The parameters, the outer loop's state, and the checkpoint's step and
      number of workers.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      ValueError: If it is damaged, or does not match the shapes.
    """
    shardings = jax.tree.map(lambda x: x.sharding, (params, outer))
    whole = to_whole(self._program, (params, outer))
    asked, step = step, self._resolve_step(step)
    while True:
      try:
        workers = self.num_workers(step)
        read = self._read(step, _items(*whole))
        break
      except ValueError:
        newest = self._resolve_step(None)
        if asked is not None or newest == step:
          raise
        step = newest
    found = read.params, read["outer"] if outer else outer
    return *to_stored(self._program, found, shardings), step, workers

  def open_params(self, step: int | None = None) -> tuple[Any, int]:
    """Verifies the workers' parameters, and opens them for reading in slices.

    The parameters are read once more to be verified, one chunk at a time.

    Args:
      step: The step of the checkpoint; None for the newest one.

    Returns:
      Tree of `slices.StoredArray`, ``[workers, ...]``, and the checkpoint's
      step.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
      ValueError: If it is damaged, or does not match the program.
    """
    step = self._resolve_step(step)
    with self._open_for_reading(step, ["params"]) as path:
      if self._read_checksums(step) is not None:
        checksums.check(path, ["params"])
      names = self._program.stored_shapes
      return slices.open_params(self.directory, step, names), step

  def close(self) -> None:
    """Waits for a checkpoint that is being written, and closes the files."""
    with self._opened, contextlib.closing(self._reader):
      if self._manager is not None:
        self._manager.close()

  def wait(self) -> None:
    """Waits until the last checkpoint is written."""
    self._manager.wait_until_finished()

  def _read(
    self, step: int, trees: dict[str, Any], **items: Any
  ) -> ocp.args.Composite:
    """Reads items of a checkpoint, and verifies them.

    ``trees`` has the shapes of items of arrays, ``items`` Orbax's arguments
    for all other items.

    If the checkpoint has another number of workers, surplus ones are dropped
    and missing ones are filled with zeros (``strict=False``).
    """
    equal = self.num_workers(step) == self._program.layout.worker.size
    items |= {
      name: ocp.args.StandardRestore(x, strict=equal)
      for name, x in trees.items()
    }
    with self._open_for_reading(step, items) as path:
      read = self._reader.restore(path, args=ocp.args.Composite(**items))
      if (sums := self._read_checksums(step)) is not None:
        for name in trees:
          checksums.verify(name, sums, read[name])
        if "position" in items:
          checksums.verify_json("position", sums, read.position)
      return read

  def _read_checksums(self, step: int) -> dict[str, Any] | None:
    """Returns the checksums of a checkpoint; prints a line if it has none."""
    path = self.directory / str(step)
    found = checksums.read(path)
    if found is None and jax.process_index() == 0:
      print(
        f"{path} has no checksums: its arrays are not verified",
        file=sys.stderr,
      )
    return found

  def _error(self, step: int, reason: str) -> ValueError:
    """Returns an error with a checkpoint's fault, and an intact checkpoint.

    If no fault is found, the error has ``reason``.

    Reads the checkpoint completely to find its fault, and then other
    checkpoints, the newest first, until one is intact.
    """
    path = self.directory / str(step)
    if not (found := _fault(path)):  # as far as checksums tell
      return ValueError(f"{path} cannot be read: {reason}")
    text = f"{path} is damaged: {found}"
    for other in reversed(self.steps()):
      there = self.directory / str(other)
      # A checkpoint without checksums is not known to be intact.
      if other != step and (there / checksums.ITEM).exists() and (
        not _fault(there)
      ):
        return ValueError(
          f"{text}. Step {other} is intact: commands with the flag --step read "
          f"it by --step={other}; train continues from it after `mv {path} "
          f"{self.directory.parent}/damaged_{step}`"
        )
    return ValueError(text)

  @contextlib.contextmanager
  def _open_for_reading(
    self, step: int, items: Iterable[str]
  ) -> Iterator[epath.Path]:
    """Yields a checkpoint's path; a read error becomes a one-line ValueError.

    Raises:
      ValueError: If an item is missing or damaged.
    """
    path = self.directory / str(step)
    missing = [name for name in items if not (path / name).exists()]
    if missing:
      raise self._error(
        step, f"it has no {', '.join(missing)}; it is damaged, or of another "
        "version or outer loop"
      )
    try:
      with waiting_for_arrays():
        yield path
    except Exception as error:
      # For damaged array data, Orbax raises a plain Exception with the metadata
      # of the array; the reason is the exception's cause. For other damaged
      # files, it raises any type, assertions included.
      cause = (error.__cause__ or error) if type(error) is Exception else error
      if isinstance(cause, jax.errors.JaxRuntimeError):
        raise
      raise self._error(step, _first_line(cause)) from error

  def _resolve_step(self, step: int | None) -> int:
    """Returns ``step`` if it has a checkpoint; for None, the newest step.

    Raises:
      FileNotFoundError: If there is no such checkpoint.
    """
    steps = self.steps()
    if not steps:
      raise FileNotFoundError(f"no checkpoint in {self.directory}")
    if step is not None and step not in steps:
      raise FileNotFoundError(
        f"no checkpoint of step {step} in {self.directory}; "
        f"there are {', '.join(map(str, steps))}"
      )
    return steps[-1] if step is None else step


@contextlib.contextmanager
def waiting_for_arrays() -> Iterator[None]:
  """Context manager in which event loops close only after pending transfers.

  Orbax reads and writes arrays concurrently and closes its event loop at the
  first error. Each TensorStore transfer that ends later would find a closed
  loop and print a traceback.
  """
  policy = asyncio.get_event_loop_policy()
  asyncio.set_event_loop_policy(_EventLoopPolicy())
  try:
    yield
  finally:
    asyncio.set_event_loop_policy(policy)


class _EventLoopPolicy(asyncio.DefaultEventLoopPolicy):
  """Policy that creates event loops of type `_DrainingEventLoop`."""

  def new_event_loop(self) -> asyncio.AbstractEventLoop:
    return _DrainingEventLoop()


class _DrainingEventLoop(asyncio.SelectorEventLoop):
  """Event loop that closes after all of its tasks have ended.

  After a failed write, such as on a full disk, Orbax cancels all other writes.
  TensorStore ends these later, and their results are discarded.
  """

  def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
    try:
      return super().call_soon_threadsafe(*args, **options)
    except RuntimeError:
      if not self.is_closed():
        raise
      return None

  def close(self) -> None:
    if left := not self.is_closed() and asyncio.all_tasks(self):
      self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    super().close()


def _items(params: Any, outer: Any) -> dict[str, Any]:
  """Returns the checkpoint items "params" and "outer".

  There is no "outer" if it is empty, since Orbax does not write empty trees.
  """
  return {"params": params} | ({"outer": outer} if outer else {})


def _all_items(state: TrainState) -> dict[str, Any]:
  """Returns all arrays of a state by checkpoint item: params, outer, rest."""
  rest = {"opt_state": state.opt_state, "key": state.key, "step": state.step}
  return _items(state.params, state.outer) | {"rest": rest}


def _fault(path: epath.Path) -> str:
  """Returns a line about the first fault in a checkpoint's files, or ""."""
  try:
    checksums.check(path)
  except Exception as error:  # damaged files cause errors of any type
    return _first_line(error)
  return ""


def _first_line(error: BaseException) -> str:
  """Returns the first line of an error's text, or its type."""
  return next(iter(str(error).splitlines()), type(error).__name__)[:300]
