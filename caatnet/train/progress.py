"""Progress of a run: a bar on a terminal, else a line every 10 seconds."""

import time

from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TextColumn,
  TimeRemainingColumn,
)


class TrainProgress:
  """Progress display with step, loss and throughput of a run."""

  def __init__(
    self, label: str, first_step: int, num_steps: int, quiet: bool = False
  ) -> None:
    self._console = Console(quiet=quiet, soft_wrap=True)
    self._label, self._num_steps = label, num_steps
    self._last_line = time.monotonic()
    self._bar = None
    if self._console.is_terminal and not quiet:
      self._bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(),
        console=self._console,
      )
      self._task = self._bar.add_task(
        label, total=num_steps, completed=first_step, status="compiling"
      )
      self._bar.start()

  def update(
    self, step: int, loss: float, units_per_second: float | None, unit: str
  ) -> None:
    """Shows a completed step.

    Args:
      step: The number of updates made.
      loss: The training loss of the step, in nats.
      units_per_second: Throughput; None while it is unknown.
      unit: Unit of the throughput, such as "tokens".
    """
    status = f"loss {loss:.4f}"
    if units_per_second:  # known from the third step
      status += f"  {units_per_second:,.0f} {unit}/s"
    if self._bar:
      self._bar.update(self._task, completed=step, status=status)
    elif step == self._num_steps or time.monotonic() - self._last_line > 10:
      self._last_line = time.monotonic()
      self.say(f"{self._label}: step {step}/{self._num_steps}  {status}")

  def say(self, text: str) -> None:
    """Prints a line above the bar."""
    self._console.print(text, highlight=False, markup=False, emoji=False)

  def close(self) -> None:
    """Removes the bar and restores the terminal."""
    if self._bar:
      self._bar.stop()
