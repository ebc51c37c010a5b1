"""Small runs of the server's core with a simulated clock."""

import numpy as np

from caatnet.federated import events, server, simulate


class Plain:
  """FedAvg without jax; an update above 1e6 is an outlier."""

  def init(self, params):
    return ()

  def update(self, mean, state, params):
    return params + mean, state

  def healthy(self, norms):
    return [norm < 1e6 for norm in norms]

  def publish(self, difference):
    return None


PARAMS = np.float32([1, -2, 3])
EXAMPLES = (1, 2, 3, 4)


def rules(**changes):
  return server.Rules(**{
    "clients": 4, "per_round": 4, "rounds": 6, "digest": "", "seed": 0,
    "sampling": "uniform", "weights": "examples", "stragglers": "wait",
    "deadline_s": 8.0, "reconnect_s": 3.0, "patience": 0, "min_gain": 0.0,
    **changes,
  })


def train(client, round, params):
  """Moves by a part of the way to a target of the client."""
  target = np.float32([client, round, client - round])
  return np.float32(0.25) * (target - params)


def compute(client, round):
  return {"t_tr": 0.5 + 0.2 * client}


def run(some, faults=(), compute=compute, network=None):
  found = simulate.Simulation(
    some, Plain(), PARAMS,
    simulate.Clients(EXAMPLES[: some.clients], train, compute),
    simulate.Transport(network or simulate.ConstantNetwork(0.3, 0.4)), faults,
  )
  found.run(limit_s=2000.0)
  return found


def ended(found):
  return [e for _, e in found.effects if isinstance(e, events.RoundEnded)]
