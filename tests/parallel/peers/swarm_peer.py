"""Process of a peer in a swarm that fits a linear regression.

A part is the gradient over the peer's leased samples. A step is determined by
the state, the samples and their weight, so that `swarm_test` can repeat it.
"""

import hashlib
import json
import sys
import time

import numpy as np

from parallel.peers.agent import PeerSettings
from parallel.peers.swarm import Swarm
from tests.parallel.peers.worlds import PATIENCE_S, SECURITY

SIZE, SAMPLES, RATE = 1000, 4, np.float32(0.1)
START = {"theta": np.zeros(SIZE, np.float32), "last": b""}


def weight(samples):
  """Returns the weight of a part."""
  return 1.0 + samples[0][0] % 3


def gradient(theta, samples):
  """Returns the gradient of a squared error, float32 ``[SIZE]``."""
  total = np.zeros(SIZE, np.float32)
  for start, stop in samples:
    for number in range(start, stop):
      x = np.random.default_rng(number).normal(size=SIZE).astype(np.float32)
      error = np.dot(x, theta) - x.sum()
      total += error * x / np.float32(SIZE)
  return total / np.float32(SAMPLES)


def combine(exchange, state, part):
  """Takes a step of gradient descent; stores the contributors."""
  value, begun = part
  said = exchange.gather(json.dumps(begun).encode())
  return {
    "theta": state["theta"] - RATE * exchange.mean(value),
    "last": b"[" + b",".join(said) + b"]",
  }


def main(port, rounds, pause_s):
  settings = PeerSettings(alone_s=PATIENCE_S, samples=SAMPLES, checked=True)
  address = "127.0.0.1", int(port)
  said = []
  with Swarm(
    address, SECURITY, START, settings=settings, say=said.append
  ) as swarm:
    print(json.dumps({"me": swarm.me}), flush=True)
    while swarm.revision < int(rounds):
      revision, state = swarm.checkpoint
      theta, samples = state["theta"], swarm.samples
      time.sleep(float(pause_s))
      begun = revision, samples
      said.clear()
      state = swarm.give(
        (gradient(theta, samples), begun), combine, weight(samples)
      )
      print(json.dumps({
        "revision": swarm.revision, "digest": swarm.digest,
        "counted": swarm.counted, "epoch": swarm.epoch,
        "dropped": [text for text in said if "is dropped" in text],
        "last": json.loads(state["last"]),
        "theta": hashlib.sha256(state["theta"]).hexdigest(),
      }), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
