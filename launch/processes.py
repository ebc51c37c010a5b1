"""Start and termination of a run with several processes.

If a process of a run is lost, jax aborts the other processes: immediately if a
connection breaks, else after ``HEARTBEAT_S`` without a heartbeat. The C++
runtime can only abort (a Python callback instead fails with ``std::bad_cast``,
jax 0.10.2 and 0.12), and prints some twenty lines and a stack trace. So a child
process filters the stderr of this process, and replaces these lines by one.
"""

import os
import re
import signal
import sys
from typing import BinaryIO, NoReturn

# Seconds without a heartbeat after which a process counts as lost. jax's
# default is 100 s.
HEARTBEAT_S = 30

LOST_MESSAGE = (
  b"error: another process of this run has ended, or cannot be reached; the "
  b"same commands on all of them resume the run\n"
)
# Log lines of jax's coordination between processes, and the last such line.
_LOGS = re.compile(
  rb"[IWEF]\d{4} .*(coordination_service|preemption_sync_manager)"
)
_FATAL = b"the JAX distributed service detected fatal errors"


def initialize(coordinator: str, num_processes: int, process_id: int) -> None:
  """Joins the processes of a run; to be called before jax lists devices.

  Args:
    coordinator: HOST:PORT of process 0.
    num_processes: The number of processes.
    process_id: The number of this process.
  """
  _watch_stderr()
  import jax

  jax.distributed.initialize(
    coordinator, num_processes, process_id,
    heartbeat_timeout_seconds=HEARTBEAT_S,
  )


def exit_process(code: int, several: bool) -> NoReturn:
  """Exits with a code.

  With several processes, an error exits immediately: the regular exit would
  wait for other processes, which wait for this one in a collective.
  """
  if several and code:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)


def _watch_stderr() -> None:
  """Replaces stderr by a pipe to a child process that filters it."""
  outlet, inlet = os.pipe()
  if os.fork():
    os.close(outlet)
    os.dup2(inlet, sys.stderr.fileno())
    os.close(inlet)
    return
  # The child ends when the pipe closes, not by a signal to the process group.
  os.close(inlet)
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  with os.fdopen(outlet, "rb") as lines:
    condense(lines, sys.stderr.buffer)
  os._exit(0)


def condense(lines: BinaryIO, out: BinaryIO) -> None:
  """Copies lines, and replaces jax's output of an abort by one line.

  Lines after a log line of jax's coordination are held back until the fatal
  line or the end of the input.
  """
  held: list[bytes] = []
  last = b""  # last copied line
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
  elif not last.startswith(b"error: "):  # not reported yet
    out.write(LOST_MESSAGE)
  out.flush()
