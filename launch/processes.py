"""Several processes as one run: how they meet, and how they end together.

jax aborts a process whose run has lost another one. That is at once where a
connection breaks, and else when heartbeats have been missing for
``HEARTBEAT_S``. Its C++ runtime can only abort (a callback in Python's place
fails with ``std::bad_cast``, jax 0.10.2 and 0.12), after some twenty lines and
a stack. So a child process stands between this process and its stderr, and puts
one line in their place.
"""

import os
import re
import signal
import sys
from typing import BinaryIO, NoReturn

# After how long without a sign of life a process counts as dead. jax's default
# is 100 s.
HEARTBEAT_S = 30

LOST = (
  b"error: another process of this run has ended, or cannot be reached; the "
  b"same commands on all of them resume the run\n"
)
# How jax's coordination between processes logs, and its last line.
_LOGS = re.compile(
  rb"[IWEF]\d{4} .*(coordination_service|preemption_sync_manager)"
)
_FATAL = b"the JAX distributed service detected fatal errors"


def initialize(coordinator: str, num_processes: int, process_id: int) -> None:
  """Joins the processes of a run, before jax has looked for devices.

  Args:
    coordinator: HOST:PORT of process 0.
    num_processes: How many there are.
    process_id: The number of this one.
  """
  _watch_stderr()
  import jax

  jax.distributed.initialize(
    coordinator, num_processes, process_id,
    heartbeat_timeout_seconds=HEARTBEAT_S,
  )


def leave(code: int, several: bool) -> NoReturn:
  """Exits with a code.

  With several processes an error ends this one at once. The regular way out
  waits for the others, which wait for this one in a collective.
  """
  if several and code:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


def _watch_stderr() -> None:
  """Makes this process' stderr a pipe to a child that passes it on."""
  outlet, inlet = os.pipe()
  if os.fork():
    os.close(outlet)
    os.dup2(inlet, sys.stderr.fileno())
    os.close(inlet)
    return
  # The child ends when the pipe does, and not by a signal to all of a group.
  os.close(inlet)
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  with os.fdopen(outlet, "rb") as lines:
    condense(lines, sys.stderr.buffer)
  os._exit(0)


def condense(lines: BinaryIO, out: BinaryIO) -> None:
  """Copies lines; what jax says as it aborts becomes one line.

  What follows a line of jax's coordination is held back until it is known
  whether that was the beginning of the end.
  """
  held: list[bytes] = []
  last = b""  # of what was passed on
  for line in lines:
    if held or _LOGS.match(line) or _FATAL in line:
      held.append(line)
    else:
      last = line
      out.write(line)
      out.flush()
  fatal = any(_FATAL in line for line in held)
  if not fatal:
    out.write(b"".join(held))
  elif not last.startswith(b"error: "):  # which says it already
    out.write(LOST)
  out.flush()
