"""Scripts in other Python interpreters, and functions in new processes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
from types import MappingProxyType
from typing import Any, TypeVar

from parallel.peers.emulation.processes import Process

T = TypeVar("T")
_NONE: Mapping[str, str] = MappingProxyType({})


def ask_script(
  command: Sequence[str], question: Any = None, *,
  environment: Mapping[str, str] = _NONE, limit_s: float | None = None,
) -> Any:
  """Runs a script in another Python; returns its last line, parsed as JSON.

  Args:
    command: Python, script and its arguments.
    question: Request, plain data for a line of JSON on its stdin.
    environment: Variables in addition to those of this process.
    limit_s: Seconds after which the script is ended; None for no limit.

  Raises:
    ValueError: The script cannot be run, takes too long, prints no JSON, or
      fails; the message then has the last line of its stderr.
  """
  named = f"config.benchmark.python_path={command[0]!r}"
  try:
    done = subprocess.run(
      command, input=json.dumps(question) + "\n", capture_output=True,
      text=True, check=False, env=os.environ | dict(environment),
      timeout=limit_s,
    )
  except OSError as error:
    raise ValueError(f"{named} cannot be run: {error}") from error
  except subprocess.TimeoutExpired as error:
    raise ValueError(
      f"{named} did not end within its time limit of {limit_s:g} seconds"
    ) from error
  if done.returncode:
    lines = done.stderr.strip().splitlines()
    why = lines[-1] if lines else f"it ended with code {done.returncode}"
    raise ValueError(f"{named}: {why}")
  last = "".join(done.stdout.splitlines()[-1:])
  try:
    return json.loads(last)
  except json.JSONDecodeError as error:
    raise ValueError(
      f"the last line that {named} printed must be JSON, got {last!r}"
    ) from error


@contextlib.contextmanager
def start_script(
  key: str, command: Sequence[str], needs: str, *,
  environment: Mapping[str, str] = _NONE,
) -> Iterator[Callable[[Any], Any]]:
  """Starts a script of another Python that answers each line of JSON.

  Args:
    key: Config key that names the Python, for errors.
    command: Python, script and its arguments.
    needs: Packages that the script needs, for the error if it ends.
    environment: Variables in addition to those of this process.

  Yields:
    Function that sends a request, plain data, and returns the answer. It raises
    ValueError if the script has ended.

  Raises:
    ValueError: The script cannot be run.
  """
  named = f"{key}={command[0]!r}"
  try:
    process = Process(command, environment=environment)
  except OSError as error:
    raise ValueError(f"{named} cannot be run: {error}") from error

  def ask(question: Any) -> Any:
    process.write(json.dumps(question))
    answer = process.answer()
    if answer is None:
      raise ValueError(
        f"{named} has stopped; its error is above. It needs {needs}"
      )
    return answer

  with process:
    yield ask


def pool(count: int) -> concurrent.futures.ProcessPoolExecutor:
  """Returns a pool of fresh processes, for functions of importable modules."""
  # Spawned, not forked: jax's threads do not survive a fork.
  return concurrent.futures.ProcessPoolExecutor(
    count, multiprocessing.get_context("spawn"),
    # Ctrl-C reaches every process of the terminal. Only this one handles it,
    # and ends the pool.
    signal.signal, (signal.SIGINT, signal.SIG_IGN),
  )


def call_in_process(function: Callable[..., T], *arguments: Any) -> T:
  """Calls a function in a fresh process, whose end releases its memory.

  Raises:
    RuntimeError: The process has ended, for instance out of memory.
  """
  with pool(1) as executor:
    return executor.submit(function, *arguments).result()


def map_in_processes(
  function: Callable[[Any], T], items: Sequence[Any], count: int
) -> Iterable[T]:
  """Yields a function's result for each item, computed by several processes."""
  with pool(count) as executor:
    yield from executor.map(function, items)
