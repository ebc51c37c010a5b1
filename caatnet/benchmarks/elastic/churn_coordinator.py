"""Coordinator of a swarm with faults: its process, log and output."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import math
import pathlib
import threading
import time
from typing import Any

from caatnet import commands
from parallel.peers.emulation import processes
from parallel.peers.membership import history
from parallel.peers.membership.coordinator import Phase


class Coordinator:
  """Coordinator process that can be killed and restarted.

  Its log is replayed while it is written, so that `phase` is always known.

  Attributes:
    port: Port that it listens on, also after a restart.
    output: File to which the process writes its stdout and stderr.
  """

  def __init__(
    self, folder: pathlib.Path, environment: Mapping[str, str],
    silence_s: float, host: str = "127.0.0.1", prefix: Sequence[str] = (),
  ) -> None:
    """Starts to follow the log; starts no process yet.

    Args:
      folder: Folder of the coordinator's files.
      environment: Variables in addition to those of this process.
      silence_s: Seconds without a message after which it drops a peer.
      host: Address that it listens at.
      prefix: Prefix of its command, such as those of
        `parallel.peers.emulation.namespaces`.
    """
    self._folder, self._environment = folder, environment
    self._silence_s, self._host, self._prefix = silence_s, host, prefix
    self._process: processes.Process | None = None
    self.port = processes.free_port()
    self.output = folder / "coordinator.txt"
    self._log = folder / "log.jsonl"
    self._log.touch()
    # (time at which a line of the log was written, phase after it).
    self._phases: list[tuple[float, Phase]] = [(0.0, Phase.ASSEMBLING)]
    self._ended = threading.Event()
    threading.Thread(target=self._follow, daemon=True).start()

  def start(self, run: int, least: int) -> None:
    """Starts the process.

    Args:
      run: Number of the swarm's run; each run has its own journal.
      least: Number of members with which the run begins.
    """
    with open(self.output, "ab") as lines:
      self._process = processes.Process(
        [*self._prefix, *commands.script_command(
          "coordinator", f"--port={self.port}", f"--host={self._host}",
          f"--journal={self._folder}/journal-{run}", f"--log={self._log}",
          f"--silence_s={self._silence_s}", "--recover_s=5",
          f"--least={least}",
        )],
        environment=self._environment, output=lines,
      )

  def kill(self) -> None:
    """Kills the process."""
    if self._process is not None:
      self._process.kill()

  def end(self) -> None:
    """Ends the process, and the thread that follows its log."""
    self._ended.set()
    self.kill()

  def phase(self, moment: float = math.inf) -> Phase:
    """Returns the coordinator's phase at a ``moment`` of `time.time`."""
    after = bisect.bisect_left(self._phases, moment, key=lambda x: x[0])
    return self._phases[max(0, after - 1)][1]

  def states(self) -> list[Any]:
    """Returns all states of the coordinator, from a replay of its log."""
    return list(history.replay(history.read(self._log)))

  def lines(self, start: float, stop: float) -> list[str]:
    """Returns lines printed from 1 s before ``start`` to 1 s after ``stop``."""
    clock = [
      time.strftime("%H:%M:%S", time.localtime(moment))
      for moment in (start - 1, stop + 1)
    ]
    with open(self.output) as lines:
      return [
        f"{line[:200].strip()}\n" for line in lines
        if clock[0] <= line[:8] <= clock[1]
      ]

  def _follow(self) -> None:
    """Replays the log while it is written."""
    times: list[float] = []
    for state in history.replay(self._entries(times)):
      self._phases.append((times[-1], state.phase))

  def _entries(self, times: list[float]) -> Iterator[dict[str, Any]]:
    """Yields the log's entries as they are written; records their times."""
    line = b""
    with open(self._log, "rb") as log:
      while not self._ended.wait(0 if line.endswith(b"\n") else 0.001):
        # readline returns partial lines at the end of the file: append to them.
        line = line[: 0 if line.endswith(b"\n") else None] + log.readline()
        if line.endswith(b"\n") and line != b"\n":
          with contextlib.suppress(ValueError):  # a partial line
            found = json.loads(line)
            times.append(found["time"])
            yield found
