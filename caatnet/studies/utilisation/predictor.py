"""Predictor of compute utilisation under low-communication training.

A training step is a graph of per-layer nodes, which run on one device and one
serial link. A method (data parallelism, DiLoCo, Streaming DiLoCo with or
without overlap and with fewer bits) defines which layers are sent after which
step, and which later work waits for them. The result is the compute utilisation
at a bandwidth, or the lowest bandwidth that reaches a given utilisation.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication",
arXiv 2501.18512. The paper gives the graph, 4 L - 1 nodes per step, and the
results (its table 4), but not the costs of nodes. Assumptions here: all nodes
of the device take the same time, all L layers have the same size, and the
reduction of a layer sends f x bits x N / L bits, with N parameters and a volume
factor f (`simulate`). The embedding, a separate fragment in the paper, has its
slot in the schedule but sends nothing. The latency is not in the paper.
`caatnet.studies.utilisation.published` compares the result with table 4.

Bandwidths are in bit/s, as in the paper; `parallel.plans.hardware.links` uses
bytes per second.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from parallel.base.checks import at_least, not_negative, positive
from parallel.plans.outer.fragment_plan import FragmentSchedule

FORWARD = "forward"
BACKWARD_ACTIVATIONS = "backward for activations"
BACKWARD_PARAMETERS = "backward for parameters"
REDUCTION = "reduction"

# Number of simulated periods, of which the last is measured: the first one is
# not in the steady state, since the link is idle at its start.
_NUM_PERIODS = 3


@dataclasses.dataclass(frozen=True)
class Model:
  """Sizes of a model that determine its step time and communication.

  Attributes:
    parameters: N, the number of parameters, spread evenly over the layers.
    num_layers: L, the number of layers.
    step_seconds: T, compute time of a step in seconds, without waiting.
    name: Name of the model in tables.
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
    """Seconds of every node of the device, T / (3 L)."""
    return self.step_seconds / (3 * self.num_layers)

  @property
  def compute_seconds(self) -> float:
    """Compute time of a step in seconds.

    A step has 3 L - 1 nodes, since layer 0 has no layer below that needs a
    gradient of activations.
    """
    return (3 * self.num_layers - 1) * self.node_seconds


@dataclasses.dataclass(frozen=True)
class SyncMethod:
  """Low-communication method: layers reduced after each step, and waits.

  Attributes:
    sync_every: H; each parameter is reduced once in H steps.
    num_fragments: P, the number of fragments. Fragment p has the layers p,
      p + P, and so on, and is sent after the steps s with
      s mod H = p (H // (P + 1)). With one fragment all layers are sent at once.
    overlap_steps: tau. If it is 0, the next forward pass of a layer waits for
      the layer's reduction. Otherwise step s + 1 + tau waits for all data sent
      after step s.
    bits: Bits per parameter on the link.
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
  def times(self) -> FragmentSchedule:
    """For each fragment, the step of a period after which it is sent.

    With several fragments, an extra one has the parameters outside the layers.
    """
    several = self.num_fragments > 1
    return FragmentSchedule(self.sync_every, self.num_fragments + several)

  def layers_sent(self, step: int, num_layers: int) -> frozenset[int]:
    """Returns the layers that are reduced after a step, counted from 0."""
    fragment = self.times.due_fragment(step)
    if fragment is None or fragment >= self.num_fragments:
      return frozenset()  # no fragment is due, or the one outside the layers
    return frozenset(range(fragment, num_layers, self.num_fragments))


def data_parallel() -> SyncMethod:
  """Returns data parallelism: reduces all layers after every step, 16 bits."""
  return SyncMethod()


def diloco(sync_every: int) -> SyncMethod:
  """Returns DiLoCo: reduces all layers after every H-th step, 16 bits.

  Source: arXiv 2311.08105.
  """
  return SyncMethod(sync_every)


def streaming(
  sync_every: int, num_layers: int, overlap_steps: int = 0, bits: float = 16
) -> SyncMethod:
  """Returns Streaming DiLoCo with fragments of three layers.

  Source: arXiv 2501.18512.
  """
  fragments = max(1, num_layers // 3)  # three layers each, as in the paper
  return SyncMethod(sync_every, fragments, overlap_steps, bits)


def paper_methods(num_layers: int, sync_every: int = 100) -> dict[
  str, SyncMethod
]:
  """Returns the methods of table 4 of arXiv 2501.18512, by name."""
  return {
    "data parallel": data_parallel(),
    "DiLoCo": diloco(sync_every),
    "streaming": streaming(sync_every, num_layers),
    "+ overlap of 1": streaming(sync_every, num_layers, 1),
    "+ 4 bit": streaming(sync_every, num_layers, 1, 4),
  }


@dataclasses.dataclass(frozen=True)
class GraphNode:
  """Node of a step's graph.

  Attributes:
    kind: ``FORWARD``, ``BACKWARD_ACTIVATIONS`` or ``BACKWARD_PARAMETERS``, on
      the device; or ``REDUCTION``, on the link.
    layer: Number of the layer; 0 is the first one of the forward pass.
    after: Indices in the graph of the nodes that must end before it starts.
  """

  kind: str
  layer: int
  after: tuple[int, ...]


def step_graph(num_layers: int) -> tuple[GraphNode, ...]:
  """Builds the 4 L - 1 nodes of a step that reduces all layers.

  Args:
    num_layers: L.

  Returns:
    Nodes in the order in which device and link run them. A step that sends
    fewer layers skips the reductions of other layers.
  """
  nodes = [
    GraphNode(FORWARD, layer, (layer - 1,) if layer else ())
    for layer in range(num_layers)
  ]
  # Node that produced the gradient of the current layer's output: initially the
  # last forward node, since the loss is not a node.
  upstream = num_layers - 1
  for layer in reversed(range(num_layers)):
    gradient = (upstream,)
    # Both backward nodes of a layer need that gradient, but not each other.
    if layer:
      upstream = len(nodes)
      nodes.append(GraphNode(BACKWARD_ACTIVATIONS, layer, gradient))
    nodes.append(GraphNode(BACKWARD_PARAMETERS, layer, gradient))
    nodes.append(GraphNode(REDUCTION, layer, (len(nodes) - 1,)))
  return tuple(nodes)


@dataclasses.dataclass(frozen=True)
class Period:
  """Period of H steps in the steady state, for several bandwidths.

  Attributes:
    elapsed_s: Duration of the period in seconds, float ``[bandwidth]``.
    compute_s: Seconds of the period in which the device computes.
    link_busy_s: Seconds in which the period's reductions occupy the link, float
      ``[bandwidth]``.
  """

  elapsed_s: np.ndarray
  compute_s: float
  link_busy_s: np.ndarray

  @property
  def utilisation(self) -> np.ndarray:
    """Fraction of the time in which the device computes, ``[bandwidth]``."""
    return self.compute_s / self.elapsed_s


def simulate(
  model: Model,
  method: SyncMethod,
  bandwidth: float | Sequence[float] | np.ndarray,
  *,
  volume_factor: float = 1.0,
  latency_s: float = 0.0,
) -> Period:
  """Simulates three periods, on links of several bandwidths at once.

  Example:
    Two layers of 1e9 parameters in total, 1 s per step. At 16 Gbit/s, a
    reduction of all parameters takes 1 s:

    >>> model = Model(parameters=1e9, num_layers=2, step_seconds=1.0)
    >>> for method in (data_parallel(), diloco(10)):
    ...   print(simulate(model, method, 16e9).utilisation.round(3))
    [0.5]
    [0.909]

  Args:
    model: Model that is trained.
    method: Low-communication method.
    bandwidth: Bandwidths of the replica's link in bit/s; infinity is allowed.
    volume_factor: f, bits that a replica sends for each bit of its parameters:
      2 (M - 1) / M in a ring of M replicas, which is 1 for the paper's M = 2.
    latency_s: Seconds from the end of a reduction on the link to its arrival;
      the link is free meanwhile.

  Returns:
    The last of the periods.

  Raises:
    ValueError: A bandwidth or factor is not positive, or the latency is
      negative.

  Source: arXiv 2501.18512 for graph and methods; the costs are assumptions.
  """
  bandwidth = np.atleast_1d(np.asarray(bandwidth, dtype=np.float64))
  positive("volume_factor", volume_factor)
  if not np.all(bandwidth > 0):
    raise ValueError(f"bandwidth={bandwidth.min():g} must be positive")
  not_negative("latency_s", latency_s)
  num_layers, period = model.num_layers, method.sync_every
  # f b N / L: bits of one layer on the link.
  layer_bits = volume_factor * method.bits * model.parameters / num_layers
  run = _Simulation(model, method, layer_bits / bandwidth, latency_s)
  for _ in range(_NUM_PERIODS):
    start, busy_before = run.device, run.link_busy
    run.period()
  busy = run.link_busy - busy_before
  # If reductions take longer than a period, the backlog on the link grows, but
  # may delay no node yet in the first periods. In the steady state, a period
  # takes at least as long as its reductions.
  elapsed = np.maximum(run.device - start, busy)
  return Period(elapsed, period * model.compute_seconds, busy)


class _Simulation:
  """Simulation of periods: times at which device and link become free.

  Attributes:
    device: Time in seconds at which the device is free, float ``[bandwidth]``.
    link_busy: Busy time of the link so far in seconds, float ``[bandwidth]``.
  """

  def __init__(
    self,
    model: Model,
    method: SyncMethod,
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
    # All times are float [bandwidth]. Time at which the link is free:
    self._link = self.device
    # Without overlap: layer -> arrival time of its reduction.
    self._waits: dict[int, np.ndarray] = {}
    # With overlap: step of a period -> the earliest time at which it starts.
    self._gates: dict[int, np.ndarray] = {}

  def period(self) -> None:
    """Simulates one period of H steps."""
    overlap = self._method.overlap_steps
    for step, sent in enumerate(self._sent):
      if step in self._gates:
        self.device = np.maximum(self.device, self._gates.pop(step))
      if not sent and not self._waits:  # the device computes without waiting
        self.device = self.device + self._model.compute_seconds
        continue
      arrivals = self._step(sent)
      if not overlap:
        self._waits = arrivals
      # With overlap, step s + 1 + tau waits for everything sent after step s.
      elif arrivals:
        gate = (step + 1 + overlap) % self._method.sync_every
        self._gates[gate] = np.max(list(arrivals.values()), axis=0)

  def _step(self, sent: frozenset[int]) -> dict[int, np.ndarray]:
    """Simulates a step; returns arrival times of the layers that it sends."""
    ends: list[np.ndarray] = []
    arrivals = {}
    for node in self._graph:
      on_link = node.kind == REDUCTION
      if on_link and node.layer not in sent:
        ends.append(ends[-1])  # placeholder, so that indices in `after` hold
        continue
      start = self._link if on_link else self.device
      # A node starts when its resource is free and its predecessors have ended.
      for place in node.after:
        start = np.maximum(start, ends[place])
      # Without overlap, a layer's forward waits for its reduction in the
      # previous step.
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
  """Returns the 50 bandwidths of table 4, 0.1 to 1000 Gbit/s, in bit/s."""
  return np.logspace(8, 12, 50)


def lowest_bandwidth_indices(
  model: Model,
  method: SyncMethod,
  targets: Sequence[float],
  *,
  volume_factor: float = 1.0,
) -> list[int | None]:
  """Returns the first point of `bandwidth_grid` that reaches each target.

  Args:
    model: Model that is trained.
    method: Low-communication method.
    targets: Compute utilisations in (0, 1).
    volume_factor: Bits that a replica sends for each bit of its parameters.

  Returns:
    An index in the grid for each target; None if no point reaches it.
  """
  timeline = simulate(
    model, method, bandwidth_grid(), volume_factor=volume_factor
  )
  reached = [np.flatnonzero(timeline.utilisation >= t) for t in targets]
  return [int(places[0]) if len(places) else None for places in reached]
