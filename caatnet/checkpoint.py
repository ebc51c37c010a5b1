"""Checkpoints: asynchronous, atomic, in logical shape.

A parameter's array has all tensor ranks in it, whatever number of devices
wrote it, so that a run moves between meshes: lanes fill in. Parameters are an
item of their own, which an evaluation reads without the optimizer's state.
"""

import pathlib
from typing import Any

import orbax.checkpoint as ocp

from caatnet.train.state import TrainState


class Checkpointer:
  """Reads and writes the checkpoints of one run."""

  def __init__(self, workdir: pathlib.Path, keep: int = 1) -> None:
    """Opens ``workdir/checkpoints``, which need not exist.

    Args:
      workdir: The run's folder.
      keep: How many checkpoints to keep, the newest ones.
    """
    self.directory = pathlib.Path(workdir).absolute() / "checkpoints"
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, cleanup_tmp_directories=True
      ),
    )

  def latest_step(self) -> int | None:
    """The newest complete checkpoint's step."""
    return self._manager.latest_step()

  def path(self, step: int | None) -> str:
    """What to tell the user about a checkpoint."""
    return "none yet" if step is None else str(self.directory / str(step))

  def save(self, state: TrainState, position: dict[str, Any]) -> None:
    """Starts writing; the state may be donated right after.

    Args:
      state: The state after ``state.step`` updates.
      position: Where the data iterator stands, as plain data.
    """
    step = int(state.step)
    if step in self._manager.all_steps():
      return
    rest = {"opt_state": state.opt_state, "key": state.key}
    self._manager.save(
      step,
      args=ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        rest=ocp.args.StandardSave(rest | {"step": state.step}),
        position=ocp.args.JsonSave(position),
      ),
    )

  def restore(
    self, abstract: TrainState, step: int | None = None
  ) -> tuple[TrainState, dict[str, Any]]:
    """Reads a whole training state onto the mesh of ``abstract``.

    Args:
      abstract: Shapes and shardings of the result.
      step: Which checkpoint; None: the newest.

    Returns:
      The state and the data iterator's position.

    Raises:
      FileNotFoundError: There is no such checkpoint.
    """
    step = self._existing(step)
    rest = {"opt_state": abstract.opt_state, "key": abstract.key}
    read = self._manager.restore(
      step,
      args=ocp.args.Composite(
        params=ocp.args.StandardRestore(abstract.params),
        rest=ocp.args.StandardRestore(rest | {"step": abstract.step}),
        position=ocp.args.JsonRestore(),
      ),
    )
    state = TrainState(
      step=read.rest["step"],
      params=read.params,
      opt_state=read.rest["opt_state"],
      key=read.rest["key"],
    )
    return state, read.position

  def restore_params(
    self, abstract: Any, step: int | None = None
  ) -> tuple[Any, int]:
    """Reads the parameters alone; see ``restore``.

    Returns:
      The parameters and the step at which they were saved.
    """
    step = self._existing(step)
    args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
    return self._manager.restore(step, args=args).params, step

  def close(self) -> None:
    """Waits for what is being written."""
    self._manager.close()

  def wait(self) -> None:
    """Waits until the last save is on disk."""
    self._manager.wait_until_finished()

  def _existing(self, step: int | None) -> int:
    steps = sorted(self._manager.all_steps())
    if not steps:
      raise FileNotFoundError(f"no checkpoint in {self.directory}")
    if step is not None and step not in steps:
      raise FileNotFoundError(
        f"no checkpoint of step {step} in {self.directory}; "
        f"there are {', '.join(map(str, steps))}"
      )
    return steps[-1] if step is None else step
