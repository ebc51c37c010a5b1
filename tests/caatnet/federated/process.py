"""Server or client with numpy instead of a model, as a process of its own.

  python -m tests.caatnet.federated.process server PORT WORKDIR
  python -m tests.caatnet.federated.process client PORT ID STEP_S
  python -m tests.caatnet.federated.process linked --server=HOST:PORT \\
    --client=ID

The last form is that of `emulation.Emulation.serve`.
"""

import pathlib
import sys
import time

import numpy as np

from caatnet.federated.client import Client, Codecs, TrainingResult
from caatnet.federated.service import Service
from parallel.peers.transport.handshake import Security, parse_address
from tests.caatnet.federated import numeric

SECURITY = Security(b"a token of the tests")
PARAMS = np.linspace(-1, 1, 200_000, dtype=np.float32)  # 13 parts


def decode(data, n):
  found = np.frombuffer(data, np.float32)
  if len(found) != n:
    raise ValueError(f"{len(data)} bytes")
  return found


class Trainer:
  """Moves towards a vector of client and round, in five steps."""

  num_params, digest = len(PARAMS), "0a"

  def __init__(self, client, step_s=0.0):
    self.examples, self._client, self._step_s = client + 1, client, step_s

  def train(self, params, round, stops):
    start = time.monotonic()
    target = np.float32(self._client - round)
    found = params
    for _ in range(5):
      if stops():
        return None
      time.sleep(self._step_s)
      found = found + np.float32(0.1) * (target - found)
    return TrainingResult(
      found, float(np.abs(params).mean()), self.examples, None,
      time.monotonic() - start, 0.0, 0.0,
    )


def halves(data, n):
  return np.frombuffer(data, np.float16).astype(np.float32)


def client(number, address, step_s=0.0, trainer=None, coded=False, **options):
  codecs = Codecs(
    lambda delta, round: delta.tobytes(), halves if coded else decode
  )
  return Client(
    number, trainer or Trainer(number, step_s), codecs, address, SECURITY,
    **options,
  )


def service(port, workdir, rules, arithmetic=None, **options):
  found = Service(
    rules, arithmetic or numeric.Plain(), PARAMS, decode,
    pathlib.Path(workdir), **options,
  )
  found.listen(("127.0.0.1", port), SECURITY)
  return found


class Halves(numeric.Plain):
  """Publishes differences in float16; keeps all published vectors."""

  def __init__(self):
    self.published = [PARAMS]

  def publish(self, difference):
    coded = difference.astype(np.float16)
    decoded = coded.astype(np.float32)
    self.published.append(self.published[-1] + decoded)
    return coded.tobytes(), decoded


def rules(**changes):
  return numeric.rules(**{
    "clients": 3, "per_round": 2, "rounds": 6, "digest": "0a",
    "reconnect_s": 60.0, **changes,
  })


if __name__ == "__main__":
  role, port, *rest = sys.argv[1:]
  if role == "linked":
    server, number = (word.partition("=")[2] for word in (port, rest[0]))
    client(int(number), parse_address("", server), alone_s=30.0).run()
  elif role == "server":
    with service(int(port), rest[0], rules(), silence_s=2.0) as served:
      served.serve()
  else:
    client(
      int(rest[0]), ("127.0.0.1", int(port)), float(rest[1]), alone_s=30.0
    ).run()
