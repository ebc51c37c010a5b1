"""Swarms of processes on loopback: peers and coordinators die and return.

Each revision that a peer reports is compared, bit for bit, with the reports of
the other peers and with the same rounds computed sequentially in numpy.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from parallel.peers.membership import history
from parallel.peers.membership.coordinator import Phase
from tests.parallel.peers import swarm_peer
from tests.parallel.peers.worlds import PATIENCE_S, SECURITY

_LIMIT_S = PATIENCE_S
_SILENCE_S = 4
_ROOT = pathlib.Path(__file__).parents[3]


class _Process:
  """Process whose output lines are read as they arrive."""

  def __init__(self, *arguments, **environment):
    self.process = subprocess.Popen(
      [sys.executable, "-m", *map(str, arguments)], cwd=_ROOT, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
      env={**os.environ, "PYTHONPATH": str(_ROOT), **environment},
    )
    self.lines = []
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self):
    for line in self.process.stdout:
      self.lines.append(line)

  def end(self, number=signal.SIGKILL):
    """Ends the process by a signal."""
    self.process.send_signal(number)
    self.process.wait(10)
    self._reader.join(5)

  def close(self):
    """Ends the process if it still runs, and closes its output."""
    if self.process.poll() is None:
      self.end()
    self._reader.join(5)
    self.process.stdout.close()


class _Swarm:
  """Coordinator and peers."""

  def __init__(self, folder, *flags, silence_s=PATIENCE_S):
    with socket.create_server(("127.0.0.1", 0)) as free:
      self.port = free.getsockname()[1]
    self._folder, self._flags = folder, flags
    self._silence_s = silence_s
    self.peers = []
    self.coordinators = []
    self.coordinate()

  def coordinate(self):
    """Starts a coordinator on the existing journal, if any."""
    self.coordinators.append(_Process(
      "launch.coordinator", f"--port={self.port}", "--host=127.0.0.1",
      f"--journal={self._folder}/journal", f"--silence_s={self._silence_s}",
      "--reconnect_s=1", *self._flags, ELASTIC_TOKEN=SECURITY.token.decode(),
    ))

  def join(self, rounds=10**6, pause_s=0.05):
    """Starts a peer and returns it."""
    self.peers.append(
      _Process("tests.parallel.peers.swarm_peer", self.port, rounds, pause_s)
    )
    return self.peers[-1]

  def wait(self, what, condition):
    """Waits until a condition holds."""
    end = time.monotonic() + _LIMIT_S
    while not condition():
      assert time.monotonic() < end, f"{what}: {self.said()}"
      time.sleep(0.02)

  def go_on(self, peer, count=3):
    """Waits until a peer has contributed to ``count`` more rounds."""
    def counted():
      return sum(line["counted"] for line in seen(peer))

    wanted = counted() + count
    self.wait(f"{wanted} rounds", lambda: counted() >= wanted)

  def said(self):
    """Returns the last lines of all processes."""
    return "\n".join(
      "".join(p.lines[-6:]) for p in [*self.coordinators, *self.peers]
    )

  def log(self):
    """Returns the path of the coordinators' log."""
    return list(history.read(f"{self._folder}/journal.log.jsonl"))


@contextlib.contextmanager
def _swarm(folder, *flags, **options):
  swarm = _Swarm(folder, *flags, **options)
  try:
    yield swarm
  finally:
    for process in [*swarm.peers, *swarm.coordinators]:
      process.close()


def seen(peer):
  """Returns what a peer reported after each of its rounds."""
  return [
    json.loads(line) for line in list(peer.lines)
    if line.startswith('{"revision"') and line.endswith("}\n")
  ]


def check(swarm):
  """Compares all reports with the same rounds in numpy; returns them."""
  revisions = {}
  for peer in swarm.peers:
    before = -1
    for line in seen(peer):
      line = dict(line)
      assert line["revision"] > before
      before = line["revision"]
      counted = line.pop("counted")
      assert not counted or line["last"]
      # A contribution is counted, or its peer reports that it is not.
      assert counted != bool(line.pop("dropped"))
      line.pop("epoch")
      assert revisions.setdefault(before, line) == line
  thetas, drawn = [swarm_peer.START["theta"]], set()
  for number in range(1, max(revisions) + 1):
    total, weights = None, np.float32(0)
    for begun, samples in revisions[number]["last"]:
      weight = np.float32(swarm_peer.weight(samples))
      part = swarm_peer.gradient(thetas[begun], samples) * weight
      total = part if total is None else total + part
      weights += weight
      numbers = {n for start, stop in samples for n in range(start, stop)}
      assert drawn.isdisjoint(numbers)
      assert len(numbers) == swarm_peer.SAMPLES
      drawn |= numbers
    thetas.append(thetas[-1] - swarm_peer.RATE * (total / weights))
    assert hashlib.sha256(thetas[-1]).hexdigest() == revisions[number]["theta"]
  *_, last = history.replay(swarm.log())
  assert last.record.revision >= max(revisions)
  return revisions


def test_rounds_equal_numpy_bit_for_bit(tmp_path):
  with _swarm(tmp_path, "--least=3") as swarm:
    peers = [swarm.join(rounds=5) for _ in range(3)]
    for peer in peers:
      assert peer.process.wait(_LIMIT_S) == 0, swarm.said()
    swarm.coordinators[0].end(signal.SIGTERM)
    assert swarm.coordinators[0].process.returncode == 0
    revisions = check(swarm)
    assert [len(revisions[r]["last"]) for r in range(1, 6)] == 5 * [3]
    assert any(
      "waits for 3 more peers: 0 of 3" in line
      or "waits for 2 more peers: 1 of 3" in line
      or "epoch 1, revision 0: 3 members" in line
      for line in swarm.coordinators[0].lines
    )


def test_peers_die_stop_and_join_while_others_continue(tmp_path):
  with _swarm(tmp_path, "--least=3", silence_s=_SILENCE_S) as swarm:

    def contributors(peer, count):
      swarm.wait(f"{count} contributors", lambda: (
        len(seen(peer)[-1]["last"]) == count
      ))

    first, second, third = (swarm.join() for _ in range(3))
    swarm.go_on(first)
    third.end()
    swarm.go_on(first)
    newcomer = swarm.join()
    swarm.go_on(newcomer)
    contributors(newcomer, 3)
    second.process.send_signal(signal.SIGSTOP)
    contributors(first, 2)  # without the stopped peer
    swarm.go_on(first)
    second.process.send_signal(signal.SIGCONT)
    swarm.go_on(second)
    contributors(second, 3)
    check(swarm)


def test_killed_coordinator_returns_without_restarts_of_peers(tmp_path):
  with _swarm(tmp_path, "--least=2", f"--recover_s={PATIENCE_S}") as swarm:
    peers = [swarm.join(), swarm.join()]
    for _ in range(2):
      swarm.go_on(peers[0])
      swarm.coordinators[-1].end()
      time.sleep(0.3)
      swarm.coordinate()
    swarm.go_on(peers[0])
    swarm.go_on(peers[1])
    assert all(peer.process.poll() is None for peer in peers)
    revisions = check(swarm)
    assert list(revisions) == [*range(1, len(revisions) + 1)]
    assert all(len(line["last"]) == 2 for line in revisions.values())


def test_late_part_counts_in_a_later_round(tmp_path):
  with _swarm(tmp_path, "--least=2", "--quorum=1", "--grace_s=0.1") as swarm:
    fast, slow = swarm.join(), swarm.join(pause_s=1)
    swarm.go_on(slow, 2)
    revisions = check(swarm)
    late = [
      (number, begun) for number, line in revisions.items()
      for begun, _ in line["last"] if begun < number - 1
    ]
    assert late
    assert len(seen(fast)) > len(seen(slow))


def test_single_peer_continues_and_its_log_is_verified(tmp_path):
  with _swarm(tmp_path, "--least=1") as swarm:
    alone = swarm.join(rounds=2)
    assert alone.process.wait(_LIMIT_S) == 0, swarm.said()
    swarm.coordinators[0].end()
    check(swarm)
    lines = swarm.log()
    states = list(history.replay(lines))
    assert Phase.RUNNING in {state.phase for state in states}
    changed = next(i for i, x in enumerate(lines) if len(x["effects"]) > 1)
    lines[changed]["effects"].pop()
    with pytest.raises(ValueError, match=f"line {changed + 1}: the log has"):
      list(history.replay(lines))
