"""How much of the time devices compute when replicas rarely talk.

A step is a graph of per-layer nodes on one device and one serial link; which
layers a step sends, and who waits for them, is the method: data parallelism,
DiLoCo, Streaming DiLoCo, with an overlap of tau steps, with fewer bits. The
answer is a compute utilisation at a bandwidth, or the lowest bandwidth that
reaches one.

Paper: Streaming DiLoCo, arXiv 2501.18512. It gives the graph, 4 L - 1 nodes
per step, and the results of its table 4, not the costs. Here all nodes of the
device take the same time, all layers have the same size, and a layer's
reduction sends f x bits x N / L. The embedding, a fragment of its own in the
paper, has its turn and sends nothing. How near that comes:
`parallel.network.utilisation_table`. Not in the paper: `latency_s`.

Bandwidths are in bit/s, as in the paper; `parallel.hardware.links` has bytes
per second.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from parallel.checks import at_least, positive
from parallel.outer.fragment_plan import FragmentTimes

FORWARD = "forward"
BACKWARD_ACTIVATIONS = "backward for activations"
BACKWARD_PARAMETERS = "backward for parameters"
REDUCTION = "reduction"

_NUM_PERIODS = 3  # the last one is measured: the first starts with a free link


@dataclasses.dataclass(frozen=True)
class Model:
  """What of a model the link and the clock notice.

  Attributes:
    parameters: N, spread evenly over the layers.
    num_layers: L.
    step_seconds: T, compute of a step without any waiting.
    name: For tables.
  """

  parameters: float
  num_layers: int
  step_seconds: float
  name: str = ""

  def __post_init__(self) -> None:
    at_least("num_layers", self.num_layers)
    positive("parameters", self.parameters)
    positive("step_seconds", self.step_seconds)

  @property
  def node_seconds(self) -> float:
    """c = T / (3 L), the same for every node of the device."""
    return self.step_seconds / (3 * self.num_layers)

  @property
  def compute_seconds(self) -> float:
    """Of a step: 3 L - 1 nodes, layer 0 has no gradient to hand down."""
    return (3 * self.num_layers - 1) * self.node_seconds


@dataclasses.dataclass(frozen=True)
class Method:
  """Which layers are reduced after which step, and who waits for them.

  Attributes:
    sync_every: H; each parameter is reduced once in H steps.
    num_fragments: P; fragment p has the layers p, p + P, ... and is sent after
      the steps s with s mod H = p (H // (P + 1)). One fragment: all layers
      at once.
    overlap_steps: tau; 0: a layer's next forward pass waits for its
      reduction. tau > 0: step s + 1 + tau waits for all that step s sent.
    bits: Of a parameter on the link.
  """

  sync_every: int = 1
  num_fragments: int = 1
  overlap_steps: int = 0
  bits: float = 16

  def __post_init__(self) -> None:
    at_least("sync_every", self.sync_every)
    at_least("num_fragments", self.num_fragments)
    at_least("overlap_steps", self.overlap_steps, 0)
    positive("bits", self.bits)
    if 1 < self.num_fragments >= self.sync_every:
      raise ValueError(
        f"num_fragments={self.num_fragments} must be less than sync_every="
        f"{self.sync_every}: fragments are sent after different steps"
      )
    if 0 < self.overlap_steps >= self.sync_every:
      raise ValueError(
        f"overlap_steps={self.overlap_steps} must be less than sync_every="
        f"{self.sync_every}: a fragment arrives before it is sent again"
      )

  @property
  def times(self) -> FragmentTimes:
    """When which fragment is sent; one more fragment holds what is no layer."""
    several = self.num_fragments > 1
    return FragmentTimes(self.sync_every, self.num_fragments + several)

  def layers_sent(self, step: int, num_layers: int) -> frozenset[int]:
    """The layers that are reduced after a step, counted from 0."""
    fragment = self.times.in_round(step)
    if fragment is None or fragment >= self.num_fragments:
      return frozenset()  # nothing, or all that is in no layer
    return frozenset(range(fragment, num_layers, self.num_fragments))


def data_parallel() -> Method:
  """All layers after every step, 16 bit."""
  return Method()


def diloco(sync_every: int) -> Method:
  """All layers after every H-th step (arXiv 2311.08105), 16 bit."""
  return Method(sync_every)


def streaming(
  sync_every: int, num_layers: int, overlap_steps: int = 0, bits: float = 16
) -> Method:
  """Fragments of three layers, one after the other (arXiv 2501.18512)."""
  fragments = max(1, num_layers // 3)
  return Method(sync_every, fragments, overlap_steps, bits)


def paper_methods(num_layers: int, sync_every: int = 100) -> dict[str, Method]:
  """The rows of table 4: name -> method."""
  return {
    "data parallel": data_parallel(),
    "DiLoCo": diloco(sync_every),
    "streaming": streaming(sync_every, num_layers),
    "+ overlap of 1": streaming(sync_every, num_layers, 1),
    "+ 4 bit": streaming(sync_every, num_layers, 1, 4),
  }


@dataclasses.dataclass(frozen=True)
class Node:
  """A piece of a step.

  Attributes:
    kind: One of the four kinds above; a reduction runs on the link.
    layer: From 0, the first one of the forward pass.
    after: Places in the step's graph of what must have ended.
  """

  kind: str
  layer: int
  after: tuple[int, ...]


def step_graph(num_layers: int) -> tuple[Node, ...]:
  """The 4 L - 1 nodes of a step that reduces everything.

  Returns:
    Nodes in the order in which device and link take them. A step that sends
    less lacks the other layers' reductions.
  """
  nodes = [
    Node(FORWARD, layer, (layer - 1,) if layer else ())
    for layer in range(num_layers)
  ]
  upstream = num_layers - 1  # what made the gradient of this layer's output
  for layer in reversed(range(num_layers)):
    gradient = (upstream,)
    if layer:
      upstream = len(nodes)
      nodes.append(Node(BACKWARD_ACTIVATIONS, layer, gradient))
    nodes.append(Node(BACKWARD_PARAMETERS, layer, gradient))
    nodes.append(Node(REDUCTION, layer, (len(nodes) - 1,)))
  return tuple(nodes)


@dataclasses.dataclass(frozen=True)
class Period:
  """A period of H steps in the steady state.

  Attributes:
    elapsed_s: float ``[bandwidth]``, seconds.
    compute_s: Seconds of it in which the device computes.
    link_busy_s: float ``[bandwidth]``, seconds of the reductions that the
      period sends.
  """

  elapsed_s: np.ndarray
  compute_s: float
  link_busy_s: np.ndarray

  @property
  def utilisation(self) -> np.ndarray:
    """float ``[bandwidth]`` in (0, 1]."""
    return self.compute_s / self.elapsed_s


def simulate(
  model: Model,
  method: Method,
  bandwidth: float | Sequence[float] | np.ndarray,
  *,
  volume_factor: float = 1.0,
  latency_s: float = 0.0,
) -> Period:
  """Runs three periods on links of several bandwidths at once.

  Args:
    model: What is trained.
    method: What is sent when.
    bandwidth: bit/s of the replica's link; infinity is allowed.
    volume_factor: f, what a replica sends for each bit of its parameters:
      2 (M - 1) / M in a ring of M replicas, so 1 for the paper's M = 2.
    latency_s: Seconds from the end of a reduction on the link to its arrival;
      the link is free meanwhile.

  Returns:
    The last period.

  Raises:
    ValueError: A bandwidth or factor that is not positive, or a negative
      latency.

  Source: arXiv 2501.18512 for graph and methods; the costs are ours.
  """
  bandwidth = np.atleast_1d(np.asarray(bandwidth, dtype=np.float64))
  positive("volume_factor", volume_factor)
  if not np.all(bandwidth > 0):
    raise ValueError(f"bandwidth={bandwidth.min():g} must be positive")
  if not 0 <= latency_s < math.inf:
    raise ValueError(f"latency_s={latency_s:g} must be at least 0")
  num_layers, period = model.num_layers, method.sync_every
  layer_bits = volume_factor * method.bits * model.parameters / num_layers
  run = _Run(model, method, layer_bits / bandwidth, latency_s)
  for _ in range(_NUM_PERIODS):
    start, busy_before = run.device, run.link_busy
    run.period()
  busy = run.link_busy - busy_before
  # A link with more work than time falls behind period by period before
  # anybody waits for it; in the end its work sets the pace.
  elapsed = np.maximum(run.device - start, busy)
  return Period(elapsed, period * model.compute_seconds, busy)


class _Run:
  """When device and link are free, and who waits for what.

  Attributes:
    device: float ``[bandwidth]``, second at which the device is free.
    link_busy: The same shape, seconds that the link has worked.
  """

  def __init__(
    self,
    model: Model,
    method: Method,
    transfer_s: np.ndarray,
    latency_s: float,
  ) -> None:
    self._model, self._method = model, method
    self._graph = step_graph(model.num_layers)
    self._sent = [
      method.layers_sent(step, model.num_layers)
      for step in range(method.sync_every)
    ]
    self._transfer_s = transfer_s
    self._latency_s = latency_s
    self.device = self.link_busy = np.zeros_like(transfer_s)
    self._link = self.device  # when it is free
    self._waits: dict[int, np.ndarray] = {}  # layer -> its arrival
    self._gates: dict[int, np.ndarray] = {}  # step of a period -> its start

  def period(self) -> None:
    """Runs H steps."""
    overlap = self._method.overlap_steps
    for step, sent in enumerate(self._sent):
      if step in self._gates:
        self.device = np.maximum(self.device, self._gates.pop(step))
      if not sent and not self._waits:
        self.device = self.device + self._model.compute_seconds
        continue
      arrivals = self._step(sent)
      if not overlap:
        self._waits = arrivals
      elif arrivals:
        gate = (step + 1 + overlap) % self._method.sync_every
        self._gates[gate] = np.max(list(arrivals.values()), axis=0)

  def _step(self, sent: frozenset[int]) -> dict[int, np.ndarray]:
    """Runs a step; returns the arrival of each layer that it sends."""
    ends: list[np.ndarray] = []
    arrivals = {}
    for node in self._graph:
      on_link = node.kind == REDUCTION
      if on_link and node.layer not in sent:
        ends.append(ends[-1])  # nothing is after it
        continue
      start = self._link if on_link else self.device
      for place in node.after:
        start = np.maximum(start, ends[place])
      if node.kind == FORWARD and node.layer in self._waits:
        start = np.maximum(start, self._waits[node.layer])
      end = start + (
        self._transfer_s if on_link else self._model.node_seconds
      )
      ends.append(end)
      if on_link:
        self._link = end
        self.link_busy = self.link_busy + (end - start)
        arrivals[node.layer] = end + self._latency_s
      else:
        self.device = end
    return arrivals


def bandwidth_grid() -> np.ndarray:
  """The 50 bandwidths of table 4: 0.1 to 1000 Gbit/s, in bit/s."""
  return np.logspace(8, 12, 50)


def lowest_bandwidth(
  model: Model,
  method: Method,
  targets: Sequence[float],
  *,
  volume_factor: float = 1.0,
) -> list[int | None]:
  """The first point of `bandwidth_grid` that reaches each target.

  Returns:
    Places in the grid; None where even the last one does not reach it.
  """
  timeline = simulate(
    model, method, bandwidth_grid(), volume_factor=volume_factor
  )
  reached = [np.flatnonzero(timeline.utilisation >= t) for t in targets]
  return [int(places[0]) if len(places) else None for places in reached]
