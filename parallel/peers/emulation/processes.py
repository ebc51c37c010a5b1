"""Processes that exchange lines of JSON with the process that starts them.

`Process` is one process with pipes. `Peers` are several that execute the same
orders, each in a process of

  python -m parallel.peers.emulation.processes PACKAGE.MODULE:CLASS ARGUMENT...

An order is a line of JSON on the process's stdin: the name of a method of the
class and its keyword arguments. The response is a line of JSON, too: start and
end of the method, in seconds of the machine's monotonic clock, its processor
time and its result. The process ends when its stdin ends. What libraries print
to stdout goes to stderr.

`Process` and `Peers` are context managers: on exit, also by an exception or an
interrupt, no process remains.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Self

# Peers of one machine share its cores, so each uses a single thread.
ONE_THREAD = {
  f"{key}_NUM_THREADS": "1" for key in ("OMP", "OPENBLAS", "MKL")
}
_NONE: Mapping[str, str] = MappingProxyType({})
_LOOPBACK = "127.0.0.1"


def module_command(name: str, *arguments: object) -> list[str]:
  """Returns the command that runs a module by this Python interpreter."""
  return [sys.executable, "-m", name, *map(str, arguments)]


def free_port() -> int:
  """Returns an unused TCP port of the loopback interface."""
  with socket.create_server((_LOOPBACK, 0)) as free:
    return free.getsockname()[1]


class Process:
  """Child process that reads lines from stdin and prints lines of JSON.

  Attributes:
    popen: Process object of the standard library.
    killed: Whether `kill` has been called.
  """

  def __init__(
    self, command: Sequence[str], *, environment: Mapping[str, str] = _NONE,
    output: IO[bytes] | None = None, quiet: bool = False,
    on_line: Callable[[Any], None] | None = None,
  ) -> None:
    """Starts the process.

    Args:
      command: Program and its arguments.
      environment: Variables in addition to those of this process.
      output: File for the stdout and stderr of the new process. By default its
        stdout is read by this object, and its stderr is inherited.
      quiet: Whether the new process's stderr is discarded.
      on_line: Callback, called in a thread with each line of JSON that the
        process prints. By default `answer` reads the lines.
    """
    # The child has a session of its own, so that an interrupt from the terminal
    # does not reach it: the parent handles the interrupt, and ends the child.
    self.popen = subprocess.Popen(
      command, env=os.environ | dict(environment), text=True,
      stdin=subprocess.PIPE, stdout=output or subprocess.PIPE,
      stderr=subprocess.DEVNULL if quiet else output, start_new_session=True,
    )
    self.killed = False
    self._reader: threading.Thread | None = None
    if on_line is not None:
      self._reader = threading.Thread(
        target=self._read, args=(on_line,), daemon=True
      )
      self._reader.start()

  def _read(self, on_line: Callable[[Any], None]) -> None:
    for line in self.popen.stdout:
      if line.endswith("}\n"):  # otherwise it was killed while writing
        on_line(json.loads(line))

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.kill()

  def write(self, text: str) -> None:
    """Writes a line to the process's stdin; no effect if it has ended."""
    # ValueError: the pipe was closed by `kill` in another thread.
    with contextlib.suppress(BrokenPipeError, ValueError):
      self.popen.stdin.write(text + "\n")
      self.popen.stdin.flush()

  def answer(self) -> Any:
    """Returns the process's next line of JSON, parsed; None if it has ended."""
    line = self.popen.stdout.readline()
    return json.loads(line) if line.endswith("\n") else None

  def kill(self) -> None:
    """Kills the process and closes its pipes."""
    self.killed = True
    self.popen.kill()
    self.popen.wait()
    if self._reader is not None:
      self._reader.join()
    for pipe in (self.popen.stdin, self.popen.stdout):
      if pipe is not None:
        with contextlib.suppress(BrokenPipeError):  # for unwritten lines
          pipe.close()


@contextlib.contextmanager
def run_at_exit(script: str, *arguments: object) -> Iterator[None]:
  """Context manager that runs a script at its end, even if Python is killed.

  Args:
    script: Commands of sh, whose output and errors are discarded.
    arguments: Values of ``$1``, ``$2``, ... in the script.
  """
  # The shell reads until this process closes the pipe or ends. It has a session
  # of its own, so that an interrupt from the terminal does not reach it.
  with subprocess.Popen(
    ["/bin/sh", "-c", f"read _; {script}", "sh", *map(str, arguments)],
    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL, start_new_session=True,
  ):
    yield


class OrderResult(NamedTuple):
  """Times and results of one order that all peers have executed.

  Attributes:
    seconds: Seconds from the first peer's start to the last one's end.
    cpu_s: Processor time of all peers together, in seconds.
    found: Result of the order at each peer.
  """

  seconds: float
  cpu_s: float
  found: list[Any]


class Peers:
  """Processes that execute orders: calls of the methods of one class.

  Attributes:
    processes: The processes; that of peer i has the i-th arguments.
  """

  def __init__(
    self, kind: str, arguments: Sequence[Sequence[object]],
    prefixes: Sequence[Sequence[str]] = (),
    environment: Mapping[str, str] = ONE_THREAD, quiet: bool = False,
  ) -> None:
    """Starts the processes.

    Args:
      kind: Class whose methods are the orders, as "package.module:Class".
      arguments: Constructor arguments of each process, as strings.
      prefixes: Prefix of each process's command, such as those of
        `parallel.peers.emulation.namespaces`; () for none.
      environment: Variables in addition to those of this process.
      quiet: Whether their stderr is discarded.
    """
    self.processes: list[Process] = []
    with contextlib.ExitStack() as stack:  # ends all if one cannot start
      for given, prefix in zip(
        arguments, prefixes or [()] * len(arguments), strict=True
      ):
        command = module_command(
          "parallel.peers.emulation.processes", kind, *given
        )
        self.processes.append(stack.enter_context(
          Process([*prefix, *command], environment=environment, quiet=quiet)
        ))
      self._stack = stack.pop_all()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._stack.close()

  def do(
    self, order: str,
    arguments: Callable[[int], Mapping[str, Any]] = lambda _: {},
  ) -> OrderResult:
    """Executes an order at all peers at the same time.

    Args:
      order: Name of a method.
      arguments: Function from a peer's number to its keyword arguments.

    Raises:
      RuntimeError: A peer has ended; its error is on stderr.
    """
    for i, process in enumerate(self.processes):
      process.write(json.dumps([order, dict(arguments(i))]))
    found = []
    for i, process in enumerate(self.processes):
      answer = process.answer()
      if answer is None:
        raise RuntimeError(
          f"peer {i} has ended with code {process.popen.wait()} at "
          f"{order!r}; its error is above, on stderr"
        )
      found.append(answer)
    return OrderResult(
      # All peers use the same monotonic clock.
      max(f["end"] for f in found) - min(f["start"] for f in found),
      sum(f["cpu_s"] for f in found), [f["found"] for f in found],
    )


def serve(peer: Any, answers: IO[str]) -> None:
  """Executes orders from stdin on ``peer``; writes responses to ``answers``."""
  for line in sys.stdin:
    order, arguments = json.loads(line)
    method = getattr(peer, order)
    start, cpu_s = time.monotonic(), time.process_time()
    found = method(**arguments)
    end = time.monotonic()
    print(json.dumps({
      "start": start, "end": end, "cpu_s": time.process_time() - cpu_s,
      "found": found,
    }), file=answers, flush=True)


def main(kind: str, *arguments: str) -> None:
  """Creates an object of the class ``kind`` and executes orders on it."""
  # Responses keep the original stdout; file descriptor 1 becomes stderr.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  module, name = kind.split(":")
  serve(getattr(importlib.import_module(module), name)(*arguments), answers)


if __name__ == "__main__":
  main(*sys.argv[1:])
