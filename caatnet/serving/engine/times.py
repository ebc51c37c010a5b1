"""Duration of a step, from measured operations or by a roofline model.

A step decodes D tokens and reads some chunks. Its time is the sum of the matrix
products (a function of the number of tokens), of attention in each layer, and
of the output head (a function of the number of sequences).
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from parallel.plans.hardware.devices import Device
from parallel.plans.network import inference
from parallel.plans.network.inference import Machine
from parallel.plans.workload import Transformer

# Grid point: chunk length, positions before it, decodes, their mean context.
GridPoint = tuple[int, int, int, int]
Chunks = Sequence[tuple[int, int]]


class StepTimes(Protocol):
  """Cost model of steps."""

  def step_s(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a step.

    Args:
      contexts: Number of positions that each decode attends to, including its
        own, ``[D]``.
      chunks: First position and length of each chunk.
    """
    ...


class AttentionTimes:
  """Measured times of attention, interpolated on a grid.

  The axes are the length of a chunk, the number of positions before it, the
  number of decodes, and the mean number of positions that they attend to.
  Interpolation is linear along each axis; outside the grid, the time at its
  edge is used. Neighbouring grid points without a measurement are ignored.
  """

  def __init__(self, points: Mapping[GridPoint, float]) -> None:
    """Takes seconds by `GridPoint`, with zeros for no chunk or no decodes."""
    self._points = dict(points)
    self._axes = [
      sorted({point[axis] for point in points} - {0}) for axis in range(4)
    ]

  def time(
    self, length: float, before: float, decodes: float, context: float
  ) -> float:
    """Returns the interpolated seconds.

    Args:
      length: Tokens of the chunk.
      before: Number of positions before the chunk.
      decodes: Number of decodes.
      context: Mean number of positions that decodes attend to.
    """
    # Up to 2^4 neighbouring grid points with their weights.
    around = [((), 1.0)]
    for axis, value in enumerate((length, before, decodes, context)):
      ends = self._neighbours(axis, value)
      around = [((*p, end), w * v) for p, w in around for end, v in ends]
    total = weight = 0.0
    for point, share in around:
      if point in self._points:
        total += share * self._points[point]
        weight += share
    # Weights of missing points are redistributed.
    return total / weight if weight else 0.0

  def _neighbours(self, axis: int, value: float) -> list[tuple[int, float]]:
    """Returns the neighbouring grid values along an axis with their weights."""
    points = self._axes[axis]
    if value <= 0 or not points:
      return [(0, 1.0)]
    if value >= points[-1]:
      return [(points[-1], 1.0)]
    at = int(np.searchsorted(points, value, side="right"))
    high = points[at]
    # Below the grid the smallest measured value is used, except for axis 1,
    # where 0 positions before the chunk is a grid point.
    if at == 0 and axis != 1:
      return [(high, 1.0)]
    low = points[at - 1] if at else 0
    share = (value - low) / (high - low)
    return [(low, 1 - share), (high, share)]


@dataclasses.dataclass(frozen=True)
class AllReduces:
  """Ring all-reduces of a layer's activations over tensor ranks.

  Attributes:
    ranks: Number of tensor ranks.
    token_bytes: Bytes of a token's activations.
    bandwidth: Bytes per second that a rank sends.
    latency_s: Latency of a message in seconds.
    per_layer: Number of all-reduces of a layer.

  Example:
    >>> pair = AllReduces(2, token_bytes=8, bandwidth=4.0, latency_s=1.0)
    >>> pair.layer_s(3)  # two, each with two messages of half of 24 bytes
    16.0
  """

  ranks: int
  token_bytes: int
  bandwidth: float
  latency_s: float
  per_layer: int = 2

  def layer_s(self, tokens: int) -> float:
    """Returns the seconds of a layer's all-reduces."""
    steps = 2 * (self.ranks - 1)
    part = tokens * self.token_bytes / self.ranks
    return self.per_layer * steps * (self.latency_s + part / self.bandwidth)


@dataclasses.dataclass
class Profile:
  """Measured operations of a model on a device.

  Steps with several chunks, or with chunks and decodes, were not measured.
  Their attention time is the sum of the times of each chunk alone, plus the
  additional time of the decodes in a step with one chunk of as many tokens and
  as many (query, key) pairs in total.

  Attention was measured with decodes of equal contexts. For unequal contexts,
  the time is interpolated between that of the mean and that of the largest one,
  since a kernel's time is not exactly linear in the positions that it reads.

  Attributes:
    num_layers: Number of layers of the model; one layer was measured.
    per_layer: For each operation of a layer, numbers of tokens and seconds.
    once: For each operation outside the layers, numbers of tokens and seconds.
    per_sequence: For head and sampling, numbers of sequences and seconds.
    attention: Seconds of a layer's attention.
    scale: Factor by which all times are multiplied.
    skew: Weight of the largest context in the interpolation of attention, in
      [0, 1]: alpha of LLMServingSim's fit.
    all_reduces: All-reduces over tensor ranks; None for a single device.
  """

  num_layers: int
  per_layer: Sequence[tuple[np.ndarray, np.ndarray]]
  once: Sequence[tuple[np.ndarray, np.ndarray]]
  per_sequence: Sequence[tuple[np.ndarray, np.ndarray]]
  attention: AttentionTimes
  scale: float = 1.0
  skew: float = 0.0
  all_reduces: AllReduces | None = None

  def __post_init__(self) -> None:
    self._known: dict[tuple[str, int], float] = {}

  def _operations_s(self, kind: str, count: int) -> float:
    """Returns the seconds of the operations `kind` for `count` tokens.

    `kind` is "per_layer", "once" or "per_sequence"; for the last, `count` is a
    number of sequences.
    """
    key = kind, count
    if key not in self._known:
      tables = getattr(self, kind)
      self._known[key] = sum(float(np.interp(count, *t)) for t in tables)
    return self._known[key]

  def _attention(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a layer's attention."""
    time, num = self.attention.time, len(contexts)
    alone = sum(time(length, start, 0, 0) for start, length in chunks)
    if not num:
      return alone
    total = sum(length for _, length in chunks)
    before = 0.0
    if chunks:
      pairs = sum(length * (start + length / 2) for start, length in chunks)
      # Start of one chunk of `total` tokens with the same number of pairs.
      before = max(0.0, pairs / total - total / 2)
      alone -= time(total, before, 0, 0)
    joint = time(total, before, num, float(np.mean(contexts)))
    if self.skew:
      largest = time(total, before, num, float(np.max(contexts)))
      joint += self.skew * (largest - joint)
    return alone + joint

  def step_s(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a step; see `StepTimes`."""
    tokens = len(contexts) + sum(length for _, length in chunks)
    layer = self._operations_s("per_layer", tokens) + self._attention(
      contexts, chunks
    )
    if self.all_reduces is not None:
      layer += self.all_reduces.layer_s(tokens)
    sequences = len(contexts) + len(chunks)
    return self.scale * (
      self.num_layers * layer + self._operations_s("once", tokens)
      + self._operations_s("per_sequence", sequences)
    )


@dataclasses.dataclass
class Roofline:
  """Lower bound of a step's time, from rates of the device and of its links.

  An all-reduce takes the time of the fastest known algorithm.

  Attributes:
    model: Sizes of the model.
    device: Device on which one rank runs.
    machine: Tensor ranks and their links; None for a single device.
    p: Fraction of channels that row-parallel projections sum over all ranks.
    utilisation: Fraction of the device's peak that matrix products reach.
  """

  model: Transformer
  device: Device
  machine: Machine | None = None
  p: float = 1.0
  utilisation: float = 1.0

  def __post_init__(self) -> None:
    self._known: dict[int, _TokenCosts] = {}

  def _seconds(self, flops: float, size: float) -> float:
    """Returns the seconds of `flops` FLOPs or `size` bytes, the larger."""
    peak = self.utilisation * self.device.peak(self.model.dtype)
    return max(flops / peak, size / self.device.memory_bandwidth)

  def _token_costs(self, tokens: int) -> "_TokenCosts":
    """Returns the costs of a step that depend only on the number of tokens."""
    model = self.model
    ranks = self.machine.num_ranks if self.machine else 1
    # With one position per token, the attention cost is the cost per pair and
    # per position; `step_s` scales it.
    step = inference.ModelStep(tokens, 1, 1)
    parts = {o.name: o for o in inference.operations(model, step, ranks)}
    # Their cost depends on contexts and sequences, not only on tokens.
    attention, head = parts.pop("attention"), parts.pop("head")
    seconds = sum(
      o.count * self._seconds(o.flops, o.bytes) for o in parts.values()
    )
    if self.machine is not None:
      shares = [self.p] * (2 * model.num_layers)
      sent = collections.Counter(
        inference.all_reduce_bytes(model, step, shares)
      )
      seconds += sum(
        count * self.machine.all_reduce(size).least
        for size, count in sent.items()
      )
    return _TokenCosts(seconds, attention, head)

  def step_s(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a step; see `StepTimes`."""
    num = len(contexts)
    tokens = num + sum(length for _, length in chunks)
    if tokens not in self._known:
      self._known[tokens] = self._token_costs(tokens)
    fixed = self._known[tokens]
    seen = int(contexts.sum()) if num else 0
    # A chunk's token i attends to start + i + 1 positions.
    pairs = seen + sum(n * start + n * (n + 1) / 2 for start, n in chunks)
    read = seen + sum(start + n for start, n in chunks)
    attention, head = fixed.attention, fixed.head
    return fixed.seconds + attention.count * self._seconds(
      attention.flops * pairs / tokens, attention.bytes * read / tokens
    ) + head.count * self._seconds(
      head.flops * (num + len(chunks)) / tokens, head.bytes
    )


@dataclasses.dataclass(frozen=True)
class _TokenCosts:
  """Costs of a step that depend only on its number of tokens.

  Attributes:
    seconds: Seconds of the layers' matrix products and of all-reduces.
    attention: FLOPs and bytes of a layer's attention to one position per token.
    head: FLOPs and bytes of the output head if it read each token.
  """

  seconds: float
  attention: inference.Operation
  head: inference.Operation
