"""Rehearsal of a federated run: real training on a simulated clock.

The server's core, codecs, samples and local steps are those of a run over
sockets. Compute times are given and links are simulated (`predict.Shaped`), so
a machine that is faster or slower than the clients shows the loss that they
would have at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from caatnet.federated import predict, server, simulate
from caatnet.federated.local import LocalTrainer
from caatnet.federated.server import Server


def rehearse(
  federation: Any, trainers: Sequence[LocalTrainer],
  compute: Sequence[Mapping[str, float]], fixed_s: float,
  measures: Callable[[np.ndarray], Mapping[str, float]],
) -> list[dict[str, Any]]:
  """Returns the loss after each round, and the time and bytes until then.

  Args:
    federation: A `caatnet.config.federated.Federation`, whose
      ``config.federated.links`` are simulated.
    trainers: Trainer of each client.
    compute: Compute times of each client, as for `predict.simulated`.
    fixed_s: Time of a message before its first byte is sent.
    measures: Maps parameters, float32 ``[n]``, to measures by name.

  Returns:
    Rows with "round", "revision", "time_s", "bytes_up" and "bytes_down" (of all
    clients since the start, for received updates), and the measures.

  Raises:
    ValueError: The run has no links.
  """
  section = federation.section
  if not federation.links:
    raise ValueError(
      "config.federated.links=() must name a link, as in ('5g-20mhz',)"
    )
  codecs = [federation.codecs(k) for k in range(section.clients)]
  params = federation.vectors.initial()
  found: list[dict[str, Any]] = []

  def train(client: int, round: int, received: np.ndarray) -> np.ndarray:
    trained = trainers[client].train(received, round, lambda: False)
    assert trained is not None
    data = codecs[client].encode(trained.params - received, round)
    return federation.uplink.decode(data, params.size)

  def downlink_bytes(state: Server, base: int) -> int:
    return predict.framed(sum(map(len, server.downlink(state, base)[1])))

  def observe(time: float, state: Server) -> None:
    found.append({
      "round": state.round - 1, "revision": state.revision, "time_s": time,
      **{
        name: sum(row[name] for row in run.rows)
        for name in ("bytes_up", "bytes_down")
      },
      **measures(state.params),
    })

  network = predict.Shaped(federation.links, fixed_s)
  run = simulate.Simulation(
    federation.rules, federation.arithmetic, params,
    simulate.Clients(
      [trainer.examples for trainer in trainers], train,
      lambda client, round: {
        name: compute[client].get(name, 0.0) for name in ("t_v", "t_tr", "t_te")
      },
    ),
    simulate.Transport(
      network, network.message_s,
      downlink_bytes=downlink_bytes,
      uplink_bytes=predict.framed(len(codecs[0].encode(params, 0))),
    ),
    aggregation_s=compute[0].get("t_a", 0.0), observe=observe,
  )
  run.run()
  return found
