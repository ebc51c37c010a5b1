"""Checkpoints: asynchronous, atomic, in logical shape.

The array of a parameter holds all workers and tensor ranks and is whole,
whatever mesh and partition wrote it. So a run can move between meshes and
partitions. Parameters and the outer loop's state are items of their own, which
an evaluation reads without the optimizer's state.
"""

import asyncio
from collections.abc import Iterable, Iterator
import contextlib
import functools
import os
from typing import Any

from etils import epath
import jax
import orbax.checkpoint as ocp

from caatnet.program import Program
from caatnet.train import files
from caatnet.train.checkpoint import slices
from caatnet.train.checkpoint.reshard import to_stored, to_whole
from caatnet.train.state import TrainState

# What Orbax and TensorStore raise of files that are not what they should be.
_DAMAGED = (KeyError, OSError, TypeError, ValueError)


class Checkpointer:
  """Reads and writes the checkpoints of one run."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    program: Program,
    keep: int | None = None,
  ) -> None:
    """Opens ``workdir/checkpoints``, which need not exist.

    Args:
      workdir: The run's folder.
      program: The model on a mesh, which says how arrays are stored.
      keep: The number of newest checkpoints to keep. None only reads: it
        changes nothing, whoever may be writing there.
    """
    self._program = program
    self.directory = files.folder(workdir) / "checkpoints"
    if not files.is_cloud(self.directory):
      self.directory = self.directory.absolute()
    self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    self._manager = None
    if keep is not None:
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=keep, cleanup_tmp_directories=True
        ),
      )

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints there are now, in order."""
    return sorted(ocp.utils.checkpoint_steps(self.directory))

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint; None if none."""
    return max(self.steps(), default=None)

  def num_workers(self, step: int | None = None) -> int:
    """Returns how many workers a checkpoint has; None asks for the newest."""
    step = self._existing(None) if step is None else step
    with self._readable(step, ["params"]) as path:
      params = ocp.StandardCheckpointHandler().metadata(path / "params")
    return jax.tree.leaves(params)[0].shape[0]

  def path(self, step: int | None) -> str:
    """Returns what to tell users about where a checkpoint is."""
    return "none yet" if step is None else str(self.directory / str(step))

  def save(self, state: TrainState, position: dict[str, Any]) -> None:
    """Starts to write a checkpoint; the state may be donated right after.

    Args:
      state: The training state, whose step names the checkpoint.
      position: The position of the data iterator, as plain data.
    """
    step = int(state.step)
    if step in self._manager.all_steps():  # a run that stops where it saved
      return
    state = to_whole(self._program, state)
    rest = {"opt_state": state.opt_state, "key": state.key}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **_items(ocp.args.StandardSave, state.params, state.outer),
        rest=ocp.args.StandardSave(rest | {"step": state.step}),
        position=ocp.args.JsonSave(position),
      ),
    )

  def restore(
    self, abstract: TrainState, step: int | None = None
  ) -> tuple[TrainState, dict[str, Any]]:
    """Reads a training state onto the mesh of ``abstract``.

    With another number of workers than the checkpoint's, the result is cut, or
    has zeros for new workers (`caatnet.train.elastic.membership`).

    Args:
      abstract: Shapes and shardings of the result.
      step: The step of the checkpoint; None for the newest one.

    Returns:
      The state, and the position of the data iterator.

    Raises:
      FileNotFoundError: There is no such checkpoint.
      ValueError: It is damaged, or one of another program.
    """
    step = self._existing(step)
    # Whole arrays are read, spread over the devices, and then cut into shards.
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    abstract = to_whole(self._program, abstract)
    rest = {"opt_state": abstract.opt_state, "key": abstract.key}
    read_args = self._read_args(self.num_workers(step))
    read = self._read(
      step,
      **_items(read_args, abstract.params, abstract.outer),
      rest=read_args(rest | {"step": abstract.step}),
      position=ocp.args.JsonRestore(),
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
    """Reads what an evaluation needs: parameters and the outer loop's state.

    A trainer may be at work. If it deletes the newest checkpoint while that is
    read, the one that came in its place is read.

    Args:
      params: Shapes and shardings of the workers' parameters.
      outer: Shapes and shardings of the outer loop's state.
      step: The step of the checkpoint; None for the newest one.

    Returns:
      The parameters, the outer loop's state, and the checkpoint's step and
      number of workers.

    Raises:
      FileNotFoundError: There is no such checkpoint.
      ValueError: It is damaged, or one of another program.
    """
    shardings = jax.tree.map(lambda x: x.sharding, (params, outer))
    whole = to_whole(self._program, (params, outer))
    asked, step = step, self._existing(step)
    while True:
      try:
        workers = self.num_workers(step)
        read = self._read(step, **_items(self._read_args(workers), *whole))
        break
      except ValueError:
        newest = self._existing(None)
        if asked is not None or newest == step:
          raise
        step = newest
    found = read.params, read["outer"] if outer else outer
    return *to_stored(self._program, found, shardings), step, workers

  def open_params(self, step: int | None = None) -> tuple[Any, int]:
    """Opens the workers' parameters, to be read in slices.

    Args:
      step: The step of the checkpoint; None for the newest one.

    Returns:
      Tree of `slices.Stored`, ``[workers, ...]``, and the checkpoint's step.

    Raises:
      FileNotFoundError: There is no such checkpoint.
      ValueError: It is damaged, or one of another program.
    """
    step = self._existing(step)
    with self._readable(step, ["params"]):
      names = self._program.stored_shapes
      return slices.open_params(self.directory, step, names), step

  def _read_args(self, workers: int) -> Any:
    """Returns what makes an item's arguments for reading.

    Of a checkpoint with another number of workers those that are too many are
    left out, and zeros stand for those that are missing.

    Args:
      workers: How many the checkpoint has.
    """
    equal = workers == self._program.layout.worker.size
    return functools.partial(ocp.args.StandardRestore, strict=equal)

  def close(self) -> None:
    """Waits for what is being written, and closes the files."""
    if self._manager is not None:
      self._manager.close()
    self._reader.close()

  def wait(self) -> None:
    """Waits until the last checkpoint is on disk."""
    self._manager.wait_until_finished()

  def _read(self, step: int, **items: Any) -> ocp.args.Composite:
    """Reads items of a checkpoint."""
    with self._readable(step, items) as path:
      return self._reader.restore(path, args=ocp.args.Composite(**items))

  @contextlib.contextmanager
  def _readable(self, step: int, items: Iterable[str]) -> Iterator[epath.Path]:
    """Gives a checkpoint's path; whatever is wrong with it is one line."""
    path = self.directory / str(step)
    missing = [name for name in items if not (path / name).exists()]
    if missing:
      raise ValueError(
        f"{path} has no {', '.join(missing)}: it is damaged, or of another "
        "version or outer loop"
      )
    try:
      with waiting_for_reads():
        yield path
    except Exception as error:
      # Of numbers, Orbax raises an Exception with all that it knows of the
      # array, because of what says what is wrong.
      cause = error.__cause__ if type(error) is Exception else error
      if not isinstance(cause, _DAMAGED):
        raise
      line = next(iter(str(cause).splitlines()), type(cause).__name__)
      raise ValueError(f"{path} cannot be read: {line[:300]}") from error

  def _existing(self, step: int | None) -> int:
    """Returns a checkpoint's step if it exists; None asks for the newest."""
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
def waiting_for_reads() -> Iterator[None]:
  """Lets event loops that are made meanwhile end no read before its time.

  Orbax reads arrays at once and closes its loop at the first error. Each read
  that TensorStore ends after that would find the loop closed, and print a
  traceback.
  """
  policy = asyncio.get_event_loop_policy()
  asyncio.set_event_loop_policy(_Loops())
  try:
    yield
  finally:
    asyncio.set_event_loop_policy(policy)


class _Loops(asyncio.DefaultEventLoopPolicy):
  """Makes event loops of the kind `_Loop`."""

  def new_event_loop(self) -> asyncio.AbstractEventLoop:
    return _Loop()


class _Loop(asyncio.SelectorEventLoop):
  """Closes when all that runs in it has ended."""

  def close(self) -> None:
    if left := not self.is_closed() and asyncio.all_tasks(self):
      self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    super().close()


def _items(make: Any, params: Any, outer: Any) -> dict[str, Any]:
  """Makes the items of parameters and of the outer loop's state.

  Many outer loops carry nothing, and Orbax writes no empty trees.
  """
  return {"params": make(params)} | ({"outer": make(outer)} if outer else {})
