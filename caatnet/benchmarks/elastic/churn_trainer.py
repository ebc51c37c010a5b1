r"""Worker of the churn benchmark that trains a model.

  python -m caatnet.benchmarks.elastic.churn_trainer PORT CONFIG_JSON FOLDER

It runs the same code as ``launch.train --elastic``, executes the commands of
`churn_peer` from stdin, and prints a line of JSON after each round, and its
validation loss at the end. The command "bits" flips a bit in the state that it
serves to others and in its own common parameters.
"""

import json
import pathlib
import random
import sys
import threading
from typing import Any

import jax
import ml_collections

from caatnet.benchmarks.elastic import churn_peer
from caatnet.config import experiments
from caatnet.train.elastic import swarm_loop
from parallel.peers.membership import leases
from parallel.peers.transport import handshake


class _Reporter:
  """Callback that prints each round and corrupts the state on command."""

  def __init__(self) -> None:
    self.spoils = threading.Event()

  def __call__(self, run: Any) -> None:
    newest = run.swarm.newest
    print(json.dumps({
      "revision": newest.number, "digest": newest.digest,
      "samples": leases.count_used_samples(newest.leases),
    }), flush=True)
    if self.spoils.is_set():
      self.spoils.clear()
      _corrupt_params(run.peer.state.outer["params"])


def _corrupt_params(params: Any) -> None:
  """Flips a bit of parameters, like a memory fault."""
  x = random.choice([x for x in jax.tree.leaves(params) if x.size])
  churn_peer.flip_bit(
    x.addressable_data(0).unsafe_buffer_pointer(), random.randrange(x.size)
  )


def main(port: str, config: str, folder: str) -> None:
  """Trains until the last step."""
  options = ml_collections.ConfigDict(
    json.loads(pathlib.Path(config).read_text())
  )
  reporter = _Reporter()
  threading.Thread(
    target=churn_peer.run_stdin_commands,
    args=(reporter.spoils.set, lambda: None), daemon=True,
  ).start()
  result = swarm_loop.train(
    experiments.build(options), folder,
    swarm_loop.Endpoint(("127.0.0.1", int(port)), handshake.read_security()),
    experiments.swarm_options(options), quiet=True, on_commit=reporter,
  )
  if result.finished:
    print(json.dumps({"validation": result.evaluation.loss}), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
