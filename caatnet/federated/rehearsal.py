"""Rehearsal of a federated run: real training on a simulated clock.

`rehearse` uses the same server core, codecs, samples and local steps as a run
over sockets. In `rehearse_streamed`, clients send parts of the model while they
compute, as in `streamed.py`. Compute times are given and links are simulated
(`predict.LinkNetwork`), so the result, the loss at each time, does not depend
on the speed of the machine that executes the rehearsal.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any

import numpy as np

from caatnet.federated import predict, server, simulate, streamed
from caatnet.federated.local import LocalTrainer
from caatnet.federated.server import ServerState

_PHASES = ("t_v", "t_tr", "t_te")  # of a client's compute


def rehearse(
  federation: Any, trainers: Sequence[LocalTrainer],
  compute: Sequence[Mapping[str, float]], fixed_s: float,
  measures: Callable[[np.ndarray], Mapping[str, float]],
) -> list[dict[str, Any]]:
  """Returns loss, time and bytes at the end of each round of a federated run.

  Args:
    federation: A `caatnet.config.federated.Federation`, whose
      ``config.federated.links`` are simulated.
    trainers: Trainer of each client.
    compute: Compute times of each client, as for `predict.simulate_run`.
    fixed_s: Time of a message before its first byte is sent.
    measures: Maps parameters, float32 ``[n]``, to measures by name.

  Returns:
    Rows with "round", "revision", "time_s", "bytes_up" and "bytes_down" (of all
    clients since the start, for received updates), and the measures.

  Raises:
    ValueError: The run has no links.
  """
  section = _section_with_links(federation)
  codecs = [federation.codecs(k) for k in range(section.clients)]
  params = federation.vectors.initial()
  found: list[dict[str, Any]] = []

  def train(client: int, round: int, received: np.ndarray) -> np.ndarray:
    trained = trainers[client].train(received, round, lambda: False)
    assert trained is not None
    data = codecs[client].encode(trained.params - received, round)
    return federation.uplink.decode(data, params.size)

  def downlink_bytes(state: ServerState, base: int) -> int:
    return predict.framed(
      sum(map(len, server.downlink_payload(state, base)[1]))
    )

  def observe(time: float, state: ServerState) -> None:
    found.append({
      "round": state.round - 1, "revision": state.revision, "time_s": time,
      **{
        name: sum(row[name] for row in run.rows)
        for name in ("bytes_up", "bytes_down")
      },
      **measures(state.params),
    })

  network = predict.LinkNetwork(federation.links, fixed_s)
  run = simulate.Simulation(
    federation.rules, federation.arithmetic, params,
    simulate.Clients(
      [trainer.examples for trainer in trainers], train,
      lambda client, round: {
        name: compute[client].get(name, 0.0) for name in _PHASES
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


def rehearse_streamed(
  federation: Any, trainers: Sequence[LocalTrainer],
  compute: Sequence[Mapping[str, float]], fixed_s: float,
  measures: Callable[[np.ndarray], Mapping[str, float]], fragments: int,
) -> list[dict[str, Any]]:
  """Returns the rows of `rehearse` if clients send fragments while they train.

  The server waits for all clients in each round. A round has as many parts as
  fragments. Before part p, a client sets fragment p to the server's merged
  values plus its own progress since it last sent p, so all progress is sent
  once. With one fragment, the run equals that of `rehearse`. Other keys of
  `config.federated` that define the rules of a round have no effect.

  Args:
    federation, trainers, compute, fixed_s, measures: Arguments of `rehearse`.
    fragments: Number of fragments, a divisor of the local steps.

  Raises:
    ValueError: The run has no links, its local steps are no multiple of
      `fragments`, or not all clients are waited for.
  """
  section = _section_with_links(federation)
  if section.stragglers != "wait" or section.per_round != section.clients:
    raise ValueError(
      f"config.federated.stragglers={section.stragglers!r} and "
      f"per_round={section.per_round} cannot be combined with streamed rounds, "
      f"which wait for all {section.clients} clients"
    )
  if section.local_steps % fragments:
    raise ValueError(
      f"config.federated.local_steps={section.local_steps} must be a multiple "
      f"of {fragments} streamed fragments"
    )
  run = _StreamedRun(federation, trainers, fragments)
  found: list[Mapping[str, float]] = []
  for round in range(section.rounds):
    sizes = [run.merge(round, fragment) for fragment in range(fragments)]
    found.append(measures(run.merged))
  downs, ups = zip(*sizes, strict=True)  # of fragments, equal in all rounds
  down, up = (sum(map(predict.framed, each)) for each in (downs, ups))
  ends = streamed.compute_merge_times_s(
    [federation.links[k] for k in run.clients],
    predict.MessageSizes(max(downs), max(ups), run.merged.nbytes),
    [
      sum(compute[k].get(name, 0.0) for name in _PHASES) / fragments
      for k in run.clients
    ],
    fragments, section.rounds, fixed_s, compute[0].get("t_a", 0.0) / fragments,
  )
  num, model = len(run.clients), predict.framed(run.merged.nbytes)
  return [
    {
      "round": round, "revision": round + 1,
      "time_s": max(ends[:(round + 1) * fragments]),
      "bytes_up": num * (round + 1) * up,
      "bytes_down": num * (model + round * down), **row,
    } for round, row in enumerate(found)
  ]


def _section_with_links(federation: Any) -> Any:
  """Returns ``config.federated``; raises ValueError if it has no links."""
  if not federation.links:
    raise ValueError(
      "config.federated.links=() must name a link, as in ('5g-20mhz',)"
    )
  return federation.section


class _StreamedRun:
  """Server and clients of a streamed run.

  Attributes:
    clients: Ids of the clients with examples.
    merged: Parameters of the server, float32 ``[n]``.
  """

  def __init__(
    self, federation: Any, trainers: Sequence[LocalTrainer], fragments: int
  ) -> None:
    """Starts a run; see `rehearse_streamed`."""
    section = federation.section
    self.clients = [k for k, each in enumerate(trainers) if each.examples]
    self._trainers = [trainers[k] for k in self.clients]
    self._codecs = [federation.codecs(k) for k in self.clients]
    self._decode = federation.uplink.decode
    self._arithmetic = federation.arithmetic
    weights = [
      float(each.examples) if section.weights == "examples" else 1.0
      for each in self._trainers
    ]
    self._shares = [np.float32(w / sum(weights)) for w in weights]
    self._piece_steps = section.local_steps // fragments
    params = federation.vectors.initial()
    ends = [params.size * i // fragments for i in range(fragments + 1)]
    self._parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    self._optimizers = [
      self._arithmetic.init(params[part]) for part in self._parts
    ]
    self.merged, self._published = params.copy(), params.copy()
    # For each client: its parameters, and its fragments as it last sent them.
    self._params = [params for _ in self.clients]
    self._sent = [params.copy() for _ in self.clients]
    self._states: list[Any] = [None for _ in self.clients]

  def merge(self, round: int, fragment: int) -> tuple[int, int]:
    """Trains all clients for a part of a round, and merges a model fragment.

    Returns:
      Bytes of the merged fragment, and of one client's update of it, as sent.
    """
    part = self._parts[fragment]
    mean, size = np.zeros_like(self.merged[part]), 0
    for i, (codecs, share) in enumerate(
      zip(self._codecs, self._shares, strict=True)
    ):
      update = self._train_piece(i, round, fragment)
      data = codecs.encode(update, round * len(self._parts) + fragment)
      size = len(data)
      mean += share * self._decode(data, mean.size)
    new, self._optimizers[fragment] = self._arithmetic.update(
      mean, self._optimizers[fragment], self.merged[part]
    )
    coded = self._arithmetic.publish(new - self._published[part])
    self.merged[part] = new
    self._published[part] = (
      new if coded is None else self._published[part] + coded[1]
    )
    return new.nbytes if coded is None else len(coded[0]), size

  def _train_piece(self, i: int, round: int, fragment: int) -> np.ndarray:
    """Trains client ``clients[i]`` for one part of a round.

    Returns its update of the model fragment that the part ends with.
    """
    trainer, part = self._trainers[i], self._parts[fragment]
    params = self._params[i].copy()
    params[part] = self._published[part] + (params[part] - self._sent[i][part])
    state = (
      trainer.moved(self._states[i], params) if fragment
      else trainer.begin(params, round)
    )
    first = fragment * self._piece_steps
    state = trainer.steps(
      state, round, range(first, first + self._piece_steps)
    )
    params = trainer.params(state)
    self._states[i], self._params[i] = state, params
    self._sent[i][part] = params[part]
    return params[part] - self._published[part]
