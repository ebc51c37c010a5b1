"""Client processes on the server's machine."""

from collections.abc import Sequence
import pathlib
import subprocess
from typing import Any

_EXIT_TIMEOUT_S = 10.0  # time limit for processes to end after the run


class Clients:
  """Client processes, one per id, with their output in files.

  On exit, the context waits for the processes (after an exception, it ends them
  first), and kills those that do not end.
  """

  def __init__(
    self, commands: Sequence[Sequence[str]], folder: pathlib.Path
  ) -> None:
    """Starts the processes.

    Args:
      commands: Command of each client.
      folder: Folder for the output, ``client-K.log``.
    """
    self._folder = folder
    self._processes = []
    for client, command in enumerate(commands):
      with open(self._log_path(client), "w") as log:
        self._processes.append(subprocess.Popen(
          command, stdout=log, stderr=subprocess.STDOUT
        ))

  def check(self) -> None:
    """Raises ValueError if a process has failed."""
    for client, process in enumerate(self._processes):
      if process.poll():
        lines = self._log_path(client).read_text().strip().splitlines()
        raise ValueError(
          f"client {client} ended with code {process.returncode}: "
          f"{lines[-1] if lines else 'no output'} ({self._log_path(client)})"
        )

  def _log_path(self, client: int) -> pathlib.Path:
    return self._folder / f"client-{client}.log"

  def __enter__(self) -> "Clients":
    return self

  def __exit__(self, *failed: Any) -> None:
    if failed[0] is not None:
      for process in self._processes:  # all at once: each may take a while
        process.terminate()
    for process in self._processes:
      try:
        process.wait(_EXIT_TIMEOUT_S)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
