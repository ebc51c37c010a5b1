r"""Worker of the churn benchmark that learns the mean of noisy vectors.

  python -m caatnet.benchmarks.elastic.churn_peer PORT PARAMETERS SAMPLES \
    PAUSE_S FOLDER new [COORDINATOR_HOST HOST]

The swarm's token is in the environment. A contribution takes PAUSE_S seconds in
addition to its arithmetic. Sample n is a target plus noise with the seed n. A
worker starts with a new state or, with "checkpoint" instead of "new", from the
newest checkpoint in the folder. With "ahead", it claims that its run has
completed more rounds, so the coordinator refuses it; it prints the reason.
After each round it writes a checkpoint and prints a line of JSON. It also
prints a line for each contribution that was not counted, which is an error if
the swarm has not reported it. Commands on stdin are "end" and faults: "cut"
breaks a connection; "half-open" makes the kernel drop all packets that arrive
on a connection, without notifying either end; "bits" flips a bit of the state.
"""

from collections.abc import Callable
import contextlib
import ctypes
import json
import os
import pathlib
import pickle
import random
import socket
import stat
import struct
import sys
import threading
import time

import numpy as np

from parallel.peers.agent import PeerSettings
from parallel.peers.membership.leases import Spans
from parallel.peers.membership.shared_state import State
from parallel.peers.swarm import Swarm
from parallel.peers.timeouts import StoppedByCoordinator
from parallel.peers.transport import handshake

LEARNING_RATE = np.float32(0.05)
TARGET = np.float32(1.0)
_EXTRA_ROUNDS = 1000  # rounds that an "ahead" worker claims in addition
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of asm-generic/socket.h


def gradient(theta: np.ndarray, samples: Spans) -> np.ndarray:
  """Returns the mean of ``theta - x`` over samples x, in the shape of theta."""
  noise = np.zeros_like(theta)
  count = 0
  for start, stop in samples:
    for number in range(start, stop):
      count += 1
      noise += np.random.default_rng(number).standard_normal(
        theta.size, np.float32
      )
  # The mean of theta - x, where x = TARGET + noise.
  return theta - TARGET - noise / np.float32(count)


def loss(theta: np.ndarray) -> float:
  """Returns half the squared error expected for an element of a new sample."""
  return float(np.mean(np.square(theta - TARGET), dtype=np.float64) + 1) / 2


def combine(exchange, state, part):
  """Returns the shared state after a step by all workers' mean gradient.

  Args:
    exchange: Communication with the other workers.
    state: Shared state before the step.
    part: This worker's gradient, and the number of its samples.
  """
  value, count = part
  counts = exchange.gather(np.array([count], np.int64))
  total = sum(int(np.frombuffer(c, np.int64)[0]) for c in counts)
  return {
    "theta": state["theta"] - LEARNING_RATE * exchange.mean(value),
    "samples": state["samples"] + total,
  }


def initial_state(parameters: int) -> dict[str, np.ndarray]:
  """Returns the initial shared state."""
  return {
    "theta": np.zeros(parameters, np.float32),
    "samples": np.zeros(1, np.int64),
  }


def _connections() -> list[socket.socket]:
  """Returns copies of this process' connected sockets."""
  found = []
  for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # listdir's own descriptor is closed
      if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
        with contextlib.ExitStack() as stack:  # closes one that only listens
          sock = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
          sock.getpeername()
          stack.pop_all()
        found.append(sock)
  return found


def _cut(sock: socket.socket) -> None:
  """Breaks a connection."""
  sock.shutdown(socket.SHUT_RDWR)


def drop_received_packets(sock: socket.socket) -> None:
  """Makes the kernel drop all arriving packets, including acknowledgements."""
  # A BPF program of one instruction: return 0 bytes, that is, drop.
  drop = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))
  program = struct.pack("@HP", 1, ctypes.addressof(drop))
  sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def flip_bit(address: int, index: int) -> None:
  """Flips the last bit of an element of a float32 array at an address."""
  ctypes.c_uint32.from_address(address + 4 * index).value ^= 1


def _corrupt_state(swarm: Swarm) -> None:
  """Flips a bit of the newest state, like a memory fault."""
  theta = swarm.state["theta"]
  flip_bit(theta.ctypes.data, random.randrange(theta.size))


def run_stdin_commands(
  spoil: Callable[[], None], end: Callable[[], None]
) -> None:
  """Executes the commands of stdin until "end".

  Args:
    spoil: Function called for the command "bits".
    end: Function called for the command "end", and when stdin ends.
  """
  harms = {"cut": _cut, "half-open": drop_received_packets}
  for line in sys.stdin:
    word = line.strip()
    if word == "bits":
      spoil()
    elif word == "end":
      break
    elif there := _connections():
      with contextlib.suppress(OSError):  # the connection has just ended
        harms[word](random.choice(there))
  end()


def _write_checkpoint(
  folder: pathlib.Path, revision: int, state: State
) -> None:
  """Writes a checkpoint unless it exists; keeps the newest three."""
  path = folder / f"{revision:09}.checkpoint"
  if path.exists():
    return
  partial = path.with_suffix(f".{os.getpid()}")
  partial.write_bytes(pickle.dumps((revision, state)))
  # The rename is atomic, so readers never see a partial checkpoint.
  partial.rename(path)
  for old in sorted(folder.glob("*.checkpoint"))[:-3]:
    old.unlink(missing_ok=True)


def main(
  port: str, parameters: str, samples: str, pause_s: str, folder: str,
  begin: str, coordinator: str = "127.0.0.1", host: str = "127.0.0.1",
) -> None:
  """Trains as a member of the swarm until the command "end"."""
  there, count = pathlib.Path(folder), int(samples)
  kept: tuple[int, State] = 0, initial_state(int(parameters))
  if begin in ("checkpoint", "ahead"):
    kept = pickle.loads(max(there.glob("*.checkpoint")).read_bytes())
  if begin == "ahead":
    kept = kept[0] + _EXTRA_ROUNDS, kept[1]
  settings = PeerSettings(
    alone_s=30, checked=True, samples=count, listen=(host, 0)
  )
  ending = threading.Event()
  said: list[str] = []
  with Swarm(
    (coordinator, int(port)), handshake.read_security(), kept[1],
    revision=kept[0], settings=settings, say=said.append,
  ) as swarm:
    threading.Thread(
      target=run_stdin_commands,
      args=(lambda: _corrupt_state(swarm), ending.set), daemon=True
    ).start()
    while not ending.is_set():
      time.sleep(float(pause_s))
      part = gradient(swarm.state["theta"], swarm.samples), count
      said.clear()
      swarm.give(part, combine)
      if begin == "ahead":
        raise RuntimeError("a run ahead of its swarm was admitted")
      if not swarm.counted:
        if not any("is dropped" in text for text in said):
          raise RuntimeError(f"a contribution was dropped silently: {said}")
        print(json.dumps({"dropped": said}), flush=True)
      revision, state = swarm.checkpoint
      _write_checkpoint(there, revision, state)
      print(json.dumps({
        "revision": revision, "digest": swarm.digest,
        "samples": int(state["samples"][0]),
        "loss": round(loss(state["theta"]), 9),
      }), flush=True)


if __name__ == "__main__":
  try:
    main(*sys.argv[1:])
  except StoppedByCoordinator as error:
    if "ahead" not in sys.argv:
      raise
    print(json.dumps({"refused": str(error)}), flush=True)
