"""Prediction of a federated run's rounds over given links.

The simulation (`simulate.py`) runs the server's core; models and updates are
TCP flows (`parallel.plans.network.fluid`). A message first takes a fixed time
on its sender, for queues, copies and encoding. Then its flow starts with TCP's
initial window, since TCP forgets a window while a client trains. Clients of a
shared link get max-min fair shares of its rates. Losses bound the rate of a
flow (`fluid.loss_limit`). Not modelled: keep-alives, the variation of delays
(the round trip has their mean), and the server's own link.

Example:
  >>> from caatnet.federated import predict
  >>> from parallel.plans.hardware import client_links
  >>> from caatnet.federated.server import Rules
  >>> rules = Rules(
  ...   clients=4, per_round=4, rounds=1, digest="", seed=0, sampling="uniform",
  ...   weights="equal", stragglers="wait", deadline_s=60, reconnect_s=10,
  ...   patience=0, min_gain=0,
  ... )
  >>> rows = predict.predict(
  ...   rules, client_links.assign_links(("5g-40mhz",), 4),
  ...   predict.MessageSizes(2_962_216, 2_962_216), {"t_tr": 10.0},
  ... )
  >>> [f"{row['t_d']:.2f} {row['t_u']:.2f}" for row in rows]
  ['0.68 1.24', '0.68 1.24', '0.68 1.24', '0.68 1.24']
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import statistics
from typing import Any, NamedTuple

import numpy as np

from caatnet.federated import messages, server, simulate
from caatnet.federated.server import Rules, ServerState
from caatnet.federated.simulate import Transfer
from parallel.peers.transport.frames import HEADER_BYTES, encode
from parallel.plans.hardware.client_links import Link
from parallel.plans.network import fluid

# Payload bytes per byte of an Ethernet frame, which shaped rates count: 1,448
# of 1,514 (0.956). Measured with tbf and htb: 0.958 and 0.965.
DATA_SHARE = fluid.SEGMENT / 1514
# Bytes of frames without vectors: of a `Part`, and of a `Work` or `Result`.
_PART_OVERHEAD_BYTES = HEADER_BYTES + len(encode(messages.Part(b"")))
_MESSAGE_OVERHEAD_BYTES = HEADER_BYTES + 120
_STAND_IN_SIZE = 1024  # elements of the vector that stands for the model

# Phase -> seconds: one mapping for all clients, or for each client one mapping
# or a sequence of one per round.
PhaseTimes = Mapping[str, float]
ComputeTimes = PhaseTimes | Sequence[PhaseTimes | Sequence[PhaseTimes]]


class MessageSizes(NamedTuple):
  """Sizes of messages.

  Attributes:
    down: Bytes of a downlink: of a model, or of a coded difference between two
      revisions.
    up: Bytes of an update.
    model: Bytes of a model, which a client without a recent revision receives;
      None if ``down`` is a model.
  """

  down: int
  up: int
  model: int | None = None


class LinkNetwork:
  """`simulate.Network` that consists of the clients' links.

  Attributes:
    message_s: Seconds that a message without a vector takes: half of the
      largest round trip.
  """

  def __init__(
    self, links: Sequence[Link], fixed_s: float = 0.0,
    data_share: float = DATA_SHARE,
  ) -> None:
    """Creates a network without transfers.

    Args:
      links: Link of each client. Clients of ``shared`` links with one name
        share the link.
      fixed_s: Time of a message before its first byte is sent.
      data_share: Payload bytes per byte of a frame; links' rates count frames.
    """
    self._fixed_s = fixed_s
    self.message_s = max(link.rtt_s for link in links) / 2
    self._paths = [
      [_path(link, client, upwards, data_share)
       for client, link in enumerate(links)] for upwards in (False, True)
    ]
    # One network per direction. All clients of a cell have the cell's link,
    # whose rate is the same for each of them.
    self._networks = [
      fluid.Network({
        path.links[0]: data_share * (link.up if upwards else link.down)
        for path, link in zip(self._paths[upwards], links, strict=True)
      }) for upwards in (False, True)
    ]

  def start(self, time: float, transfer: Transfer, size: int) -> None:
    path = self._paths[transfer.up][transfer.client]
    self._networks[transfer.up].start(
      time + self._fixed_s, transfer, path, size
    )

  def cancel(self, time: float, transfer: Transfer) -> None:
    self._networks[transfer.up].cancel(time, transfer)

  def next_s(self) -> float:
    return min(network.next_s() for network in self._networks)

  def advance(self, time: float) -> list[Transfer]:
    return [t for network in self._networks for t in network.advance(time)]


def simulate_run(
  rules: Rules, links: Sequence[Link], sizes: MessageSizes,
  compute: ComputeTimes, fixed_s: float = 0.0, rounds: int | None = None, *,
  data_share: float = DATA_SHARE,
) -> simulate.Simulation:
  """Simulates a run until it ends; returns its `simulate.Simulation`.

  Args:
    rules: Constants of the run.
    links: Link of each client.
    sizes: Sizes of messages, without frames.
    compute: Mapping from the phases "t_v", "t_tr" and "t_te" to seconds (0 if
      missing) for all clients, or one entry per client: a mapping, or a list
      of mappings that rounds use in turn. The first mapping also has the
      server's "t_a".
    fixed_s: Time of a message before its first byte is sent; see
      `fit_fixed_time_s`.
    rounds: Number of rounds; None for that of the rules.
    data_share: Payload bytes per byte of a frame; links' rates count frames.

  Raises:
    ValueError: The number of links or compute times is not that of clients.
  """
  each = [compute] * rules.clients if isinstance(compute, Mapping) else compute
  if not len(links) == len(each) == rules.clients:
    raise ValueError(
      f"links ({len(links)}) and compute times ({len(each)}) must have one "
      f"entry for each of {rules.clients} clients"
    )
  phases = [
    [
      {name: times.get(name, 0.0) for name in ("t_v", "t_tr", "t_te")}
      for times in _times_per_round(given)
    ] for given in each
  ]
  rules = dataclasses.replace(
    rules, digest="", patience=0,
    rounds=rules.rounds if rounds is None else rounds,
  )

  def downlink_bytes(state: ServerState, base: int) -> int:
    coded, parts = server.downlink_payload(state, base)
    return framed(
      len(parts) * sizes.down if coded else sizes.model or sizes.down
    )

  network = LinkNetwork(links, fixed_s, data_share)
  params = np.zeros(_STAND_IN_SIZE, np.float32)
  found = simulate.Simulation(
    rules, _SizeOnlyArithmetic(sizes), params,
    simulate.Clients(
      [1] * rules.clients, lambda client, round, received: params,
      lambda client, round: phases[client][round % len(phases[client])],
    ),
    simulate.Transport(
      network, network.message_s, math.inf, downlink_bytes, framed(sizes.up)
    ),
    aggregation_s=_aggregation_s(each[0]),
  )
  found.run()
  return found


def predict(
  rules: Rules, links: Sequence[Link], sizes: MessageSizes,
  compute: ComputeTimes,
  fixed_s: float = 0.0, rounds: int | None = None, **options: Any,
) -> list[dict[str, Any]]:
  """Returns predicted rows, with the keys of `service.Service.rows`.

  Rows are ordered by round and client. An update never received has no row.

  Args:
    rules, links, sizes, compute, fixed_s, rounds, **options: Arguments of
      `simulate_run`.

  Raises:
    ValueError: The number of links or compute times is not that of clients.
  """
  run = simulate_run(rules, links, sizes, compute, fixed_s, rounds, **options)
  first = compute if isinstance(compute, Mapping) else compute[0]
  rows = sorted(run.rows, key=lambda row: (row["round"], row["client"]))
  return [row | {"t_a": _aggregation_s(first)} for row in rows]


def _times_per_round(
  times: PhaseTimes | Sequence[PhaseTimes]
) -> Sequence[PhaseTimes]:
  """Returns a client's phase times as a list that its rounds use in turn."""
  return [times] if isinstance(times, Mapping) else times


def _aggregation_s(times: PhaseTimes | Sequence[PhaseTimes]) -> float:
  return _times_per_round(times)[0].get("t_a", 0.0)


def fit_fixed_time_s(
  measured: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]]
) -> float:
  """Returns the fixed time of a message in seconds, at least 0.

  It is half of the measured minus the predicted median time of downlink plus
  uplink; the prediction must be without a fixed time. It grows with the size
  of the message: interpolate between fits of several models.

  Raises:
    ValueError: There are no rows with both times.
  """
  medians = []
  for rows in (measured, predicted):
    times = [
      row["t_d + t_u"] if "t_d + t_u" in row else row["t_d"] + row["t_u"]
      for row in rows if "t_u" in row or "t_d + t_u" in row
    ]
    if not times:
      raise ValueError("no row has the times of both a downlink and an uplink")
    medians.append(statistics.median(times))
  return max(0.0, (medians[0] - medians[1]) / 2)


class _SizeOnlyArithmetic:
  """Arithmetic of a run whose vectors have a size but no meaningful values.

  A coded difference has the same fraction of the model's bytes as in a real
  run, so that the server keeps as many differences.
  """

  def __init__(self, sizes: MessageSizes) -> None:
    self._coded = None
    if sizes.model is not None:
      self._coded = bytes(
        math.ceil(4 * _STAND_IN_SIZE * sizes.down / sizes.model)
      )

  def init(self, params: np.ndarray) -> tuple[np.ndarray, ...]:
    return ()

  def update(
    self, mean: np.ndarray, state: tuple[np.ndarray, ...], params: np.ndarray
  ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    return params, state

  def healthy(self, norms: list[float]) -> list[bool]:
    return [True] * len(norms)

  def publish(self, difference: np.ndarray) -> tuple[bytes, np.ndarray] | None:
    return None if self._coded is None else (self._coded, difference)


def _path(link: Link, client: int, up: bool, data_share: float) -> fluid.Path:
  """Returns the path of a client's uplink (``up``) or downlink.

  A path has the name of the link, its largest rate and its round-trip time.
  ``data_share``: Payload bytes per byte of a frame, by which rates are reduced.
  """
  rate = min(
    data_share * (link.up if up else link.down),
    fluid.loss_limit(link.rtt_s, link.loss),
  )
  return fluid.Path(
    (link.name if link.shared else client,), rate, link.rtt_s
  )


def framed(size: int) -> int:
  """Returns the bytes sent for a message with ``size`` bytes of vectors."""
  return size + _MESSAGE_OVERHEAD_BYTES + _PART_OVERHEAD_BYTES * -(
    -size // messages.PART_BYTES
  )
