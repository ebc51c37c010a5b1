"""Processes that execute orders: their lines, and their end."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from parallel.peers.emulation import processes

ROOT = pathlib.Path(__file__).parents[4]


class Echo:
  """Peer that returns its name, or exits."""

  def __init__(self, me):
    print("a library prints something", flush=True)
    self._me = me

  def name(self):
    print("and again")
    return self._me, os.getpid()

  def compute(self, seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
      pass

  def leave(self, who):
    if who == self._me:
      os._exit(7)


KIND = f"{Echo.__module__}:Echo"
if "." not in Echo.__module__:  # pytest may import this file without packages
  KIND = "tests.parallel.peers.emulation.processes_test:Echo"


def _alive(pid):
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1]
  except FileNotFoundError:
    return False
  return state.split()[0] != "Z"


def _gone(pids, within_s=20):
  end = time.monotonic() + within_s
  while any(map(_alive, pids)) and time.monotonic() < end:
    time.sleep(0.01)
  return not any(map(_alive, pids))


def test_peers_answer_in_order_despite_their_output(capfd):
  """Output of libraries is this process' stderr, unless it is discarded."""
  with processes.Peers(KIND, [("x",), ("y",), ("z",)]) as peers:
    done = peers.do("name")
    start = time.monotonic()
    work = peers.do("compute", lambda i: {"seconds": 0.01 * (i + 1)})
    passed = time.monotonic() - start
  assert capfd.readouterr().err.count("a library prints something\n") == 3
  assert [name for name, _ in done.found] == ["x", "y", "z"]
  assert 0.03 <= work.seconds <= passed
  assert 0.06 <= work.cpu_s <= 3 * passed
  assert all(p.popen.returncode is not None for p in peers.processes)


def test_all_peers_are_ended_when_one_dies():
  with (
    pytest.raises(RuntimeError, match=r"peer 1 has .* code 7 at 'leave'"),
    processes.Peers(KIND, [("x",), ("y",)]) as peers,
  ):
    peers.do("leave", lambda _: {"who": "y"})
  assert all(p.popen.returncode is not None for p in peers.processes)


def test_no_peer_is_left_when_another_cannot_start(monkeypatch):
  started = []
  start = processes.Process.__init__

  def noted(self, *args, **options):
    start(self, *args, **options)
    started.append(self.popen.pid)

  monkeypatch.setattr(processes.Process, "__init__", noted)
  with pytest.raises(FileNotFoundError):
    processes.Peers(KIND, [("x",), ("y",)], [[], ["/no/such/program"]])
  assert len(started) == 1
  assert not _alive(started[0])


@pytest.mark.parametrize(("how", "send"), [
  (signal.SIGINT, os.kill), (signal.SIGINT, os.killpg),  # as a terminal
  (signal.SIGKILL, os.kill),
])
def test_peers_end_with_an_interrupted_or_killed_parent(how, send):
  script = (
    "import signal\n"
    "from parallel.peers.emulation import processes\n"
    # Background jobs of a shell script inherit that SIGINT is ignored.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    f"with processes.Peers({KIND!r}, [('x',), ('y',)]) as peers:\n"
    "  print(*(p for _, p in peers.do('name').found), flush=True)\n"
    "  peers.processes[0].answer()\n"  # waits for ever
  )
  with subprocess.Popen(
    [sys.executable, "-c", script], cwd=ROOT, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
  ) as parent:
    pids = parent.stdout.readline().split()
    assert len(pids) == 2
    assert all(map(_alive, pids))
    send(parent.pid, how)
    errors = parent.stderr.read()
  assert _gone(pids)
  # Of the parent, but not of the peers.
  assert errors.count("Traceback") == (how == signal.SIGINT), errors


@pytest.mark.filterwarnings("error")  # from threads
def test_lines_are_handed_over_until_the_process_is_killed(capfd):
  """Drops an incomplete last line."""
  code = (
    "import sys; print('an error', file=sys.stderr, flush=True)\n"
    "print('{\"a\": 1}'); print('{\"b\"', end='', flush=True); input()"
  )
  found = []
  with processes.Process(
    [sys.executable, "-uc", code], on_line=found.append
  ) as process:
    while not found:
      time.sleep(0.01)
  assert found == [{"a": 1}]
  assert process.killed
  assert "an error\n" in capfd.readouterr().err
