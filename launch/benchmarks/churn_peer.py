"""A worker of the benchmark of churn: learns the mean of noisy vectors.

  python -m launch.benchmarks.churn_peer PORT PARAMETERS SAMPLES

Its token is in the environment. Sample n is a target plus noise, drawn from n
alone. After each of its rounds it prints a line of JSON. From stdin it takes
"cut", which breaks one of its connections, and "end".
"""

import contextlib
import json
import os
import random
import socket
import stat
import sys
import threading
import time

import numpy as np

from parallel.elastic import handshake
from parallel.elastic.agent import Settings
from parallel.elastic.leases import Spans
from parallel.elastic.swarm import Swarm

RATE = np.float32(0.05)
TARGET = np.float32(1.0)
_COMPUTE_S = 0.05  # that a part takes, beside its own arithmetic


def gradient(theta: np.ndarray, samples: Spans) -> np.ndarray:
  """Returns the mean of ``theta - x`` over samples, float32 ``[n]``."""
  noise = np.zeros_like(theta)
  count = 0
  for start, stop in samples:
    for number in range(start, stop):
      count += 1
      noise += np.random.default_rng(number).standard_normal(
        theta.size, np.float32
      )
  return theta - TARGET - noise / np.float32(count)


def loss(theta: np.ndarray) -> float:
  """Returns the expected half squared error of a new sample's element."""
  return float(np.mean(np.square(theta - TARGET), dtype=np.float64) + 1) / 2


def combine(exchange, state, part):
  """A step of gradient descent; counts the samples."""
  value, count = part
  counts = exchange.gather(np.array([count], np.int64))
  total = sum(int(np.frombuffer(c, np.int64)[0]) for c in counts)
  return {
    "theta": state["theta"] - RATE * exchange.mean(value),
    "samples": state["samples"] + total,
  }


def start(parameters: int) -> dict[str, np.ndarray]:
  """Returns the shared state of the beginning."""
  return {
    "theta": np.zeros(parameters, np.float32),
    "samples": np.zeros(1, np.int64),
  }


def _cut() -> None:
  """Breaks one of this process' connections."""
  found = []
  for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # what lists them is gone by now
      if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
        found.append(socket.socket(fileno=os.dup(int(name))))
  with contextlib.suppress(OSError):
    connected = [sock for sock in found if sock.getsockopt(
      socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ) == 0]
    if connected:
      random.choice(connected).shutdown(socket.SHUT_RDWR)
  for sock in found:
    sock.close()


def _obey(ending: threading.Event) -> None:
  for line in sys.stdin:
    if line.strip() == "cut":
      _cut()
    else:
      ending.set()
  ending.set()


def main(port: int, parameters: int, samples: int) -> None:
  """Takes part until it is told to end."""
  ending = threading.Event()
  threading.Thread(target=_obey, args=(ending,), daemon=True).start()
  settings = Settings(alone_s=30, checked=True, samples=samples)
  with Swarm(
    ("127.0.0.1", port), handshake.from_files(), start(parameters),
    settings=settings,
  ) as swarm:
    while not ending.is_set():
      time.sleep(_COMPUTE_S)
      part = gradient(swarm.state["theta"], swarm.samples), samples
      swarm.give(part, combine)
      revision, state = swarm.checkpoint
      print(json.dumps({
        "revision": revision, "digest": swarm.digest,
        "counted": swarm.counted, "samples": int(state["samples"][0]),
        "loss": loss(state["theta"]),
      }), flush=True)


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
