"""A server as a child process, for a comparison of its options."""

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

from caatnet import commands
from caatnet.serving.scheduler.policies import registry
from parallel.base.checks import known

_END_S = 20.0
_POLL_S = 0.1
_ADDRESS_PATTERN = re.compile(
  r"(http://[\d.]+:\d+)\D"
)  # a line may be half written


@contextlib.contextmanager
def running_server(workdir: str, arguments: Sequence[str]) -> Iterator[str]:
  """Starts ``launch.serve`` on a free port, and ends it after the with block.

  Args:
    workdir: Folder of the training run whose model is served.
    arguments: Further flags of ``launch.serve``.

  Yields:
    The URL of the server, which has compiled its programs.

  Raises:
    ValueError: The server has ended; the message is its last printed line.
  """
  command = [
    *parent_death_prefix(),
    *commands.script_command(
      "serve", "--port=0", f"--workdir={workdir}", *arguments
    ),
  ]
  path = os.pathsep.join(filter(None, [
    str(commands.root()), os.environ.get("PYTHONPATH")
  ]))
  with tempfile.TemporaryDirectory() as folder:
    log = pathlib.Path(folder) / "log"
    with open(log, "wb") as output:
      process = subprocess.Popen(
        command, stdout=output, stderr=output, start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
      )
    try:
      yield _address(process, log)
    finally:
      end(process)


def _address(process: subprocess.Popen, log: pathlib.Path) -> str:
  """Waits until a server prints its address to `log`, and returns it."""
  while True:
    ended = process.poll() is not None
    text = log.read_text(errors="replace")
    if found := _ADDRESS_PATTERN.search(text):
      return found[1]
    if ended:
      last = [f"it ended with code {process.returncode}", *text.splitlines()]
      raise ValueError(f"the server: {last[-1].removeprefix('error: ')}")
    time.sleep(_POLL_S)


def parse_policies(text: str) -> list[str]:
  """Returns the scheduling policies of a comma-separated list.

  Raises:
    ValueError: One of them is unknown.
  """
  found = text.split(",")
  for policy in found:
    known("--compare: ", policy, registry.POLICIES)
  return found


def parent_death_prefix() -> list[str]:
  """Returns the prefix of a command that ends when this process ends.

  The kernel then sends SIGTERM to the command, even if this process is killed.
  The prefix is [] where there is no ``setpriv`` (util-linux).
  """
  found = shutil.which("setpriv")
  return [found, "--pdeathsig", "TERM"] if found else []


def end(process: subprocess.Popen) -> None:
  """Ends a server and the processes that it has started."""
  process.terminate()
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(_END_S)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
