"""How long a step takes: from measured operations, or by a roofline.

A step reads D decodes and some chunks. Its time is that of the products, by the
number of tokens, of attention in each layer, and of the head, by the number of
sequences.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from parallel.hardware.devices import Device
from parallel.network import inference
from parallel.network.inference import Machine
from parallel.workload import Transformer

Point = tuple[int, int, int, int]
Chunks = Sequence[tuple[int, int]]


class StepTimes(Protocol):
  """Knows how long a step takes."""

  def step_s(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a step.

    Args:
      contexts: How many positions each decode sees with its own, ``[D]``.
      chunks: Of each chunk its first position and its length.
    """
    ...


class Attention:
  """Measured times of attention, between the points of a grid.

  The axes are the length of a chunk, the positions before it, the number of
  decodes, and the mean of the positions that they see. Between points the time
  is linear along each axis, beyond the grid that of its edge. Of the points
  around, those that were not measured are left out.
  """

  def __init__(self, points: Mapping[Point, float]) -> None:
    """Takes times by point; a chunk or decodes that are absent are 0, 0."""
    self._points = dict(points)
    self._axes = [
      sorted({point[axis] for point in points} - {0}) for axis in range(4)
    ]

  def time(
    self, length: float, before: float, decodes: float, context: float
  ) -> float:
    """Returns the time at a point."""
    around = [((), 1.0)]
    for axis, value in enumerate((length, before, decodes, context)):
      ends = self._around(axis, value)
      around = [((*p, end), w * v) for p, w in around for end, v in ends]
    total = weight = 0.0
    for point, share in around:
      if point in self._points:
        total += share * self._points[point]
        weight += share
    return total / weight if weight else 0.0

  def _around(self, axis: int, value: float) -> list[tuple[int, float]]:
    if value <= 0:
      return [(0, 1.0)]
    points = self._axes[axis]
    if value >= points[-1]:
      return [(points[-1], 1.0)]
    at = int(np.searchsorted(points, value, side="right"))
    high = points[at]
    if at == 0 and axis != 1:  # no part of a chunk, of a decode or of its past
      return [(high, 1.0)]
    low = points[at - 1] if at else 0
    share = (value - low) / (high - low)
    return [(low, 1 - share), (high, share)]


@dataclasses.dataclass
class Profile:
  """Measured operations of a model on a device.

  Several chunks and decodes in one step are measured by no point. Their time is
  that of each chunk alone, and, once, what the decodes take beside as many
  tokens of one chunk with as many pairs of query and key.

  Attributes:
    num_layers: The layers of the model; one was measured.
    per_layer: Seconds of a layer's operations by the number of tokens.
    once: Seconds of what runs once per step, by the number of tokens.
    per_sequence: Seconds of head and sampling, by the number of sequences.
    attention: Times of a layer's attention, in seconds.
    scale: By what all times are multiplied.
  """

  num_layers: int
  per_layer: Sequence[tuple[np.ndarray, np.ndarray]]
  once: Sequence[tuple[np.ndarray, np.ndarray]]
  per_sequence: Sequence[tuple[np.ndarray, np.ndarray]]
  attention: Attention
  scale: float = 1.0

  def __post_init__(self) -> None:
    self._known: dict[tuple[str, int], float] = {}

  def _sum(self, kind: str, count: int) -> float:
    """Returns the time of the operations of a kind."""
    key = kind, count
    if key not in self._known:
      tables = getattr(self, kind)
      self._known[key] = sum(float(np.interp(count, *t)) for t in tables)
    return self._known[key]

  def _attention(self, contexts: np.ndarray, chunks: Chunks) -> float:
    time, num = self.attention.time, len(contexts)
    mean = float(np.mean(contexts)) if num else 0.0
    if not chunks:
      return time(0, 0, num, mean)
    alone = sum(time(length, start, 0, 0) for start, length in chunks)
    if not num:
      return alone
    total = sum(length for _, length in chunks)
    pairs = sum(length * (start + length / 2) for start, length in chunks)
    before = max(0.0, pairs / total - total / 2)
    beside = time(total, before, num, mean) - time(total, before, 0, 0)
    return alone + beside

  def step_s(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a step, as `StepTimes` says."""
    tokens = len(contexts) + sum(length for _, length in chunks)
    layer = self._sum("per_layer", tokens) + self._attention(contexts, chunks)
    sequences = len(contexts) + len(chunks)
    return self.scale * (
      self.num_layers * layer + self._sum("once", tokens)
      + self._sum("per_sequence", sequences)
    )


@dataclasses.dataclass
class Roofline:
  """Bounds by a device's rates and its links, for any number of tensor ranks.

  Attributes:
    model: The sizes.
    device: On which one rank runs.
    machine: The ranks; None for one device alone.
    p: The share of channels that all row doors sum.
    utilisation: The share of the device's peak that products reach.

  All-reduces take the least of what is known of their time.
  """

  model: Transformer
  device: Device
  machine: Machine | None = None
  p: float = 1.0
  utilisation: float = 1.0

  def __post_init__(self) -> None:
    self._known: dict[int, _Fixed] = {}

  def _seconds(self, flops: float, size: float) -> float:
    peak = self.utilisation * self.device.peak(self.model.dtype)
    return max(flops / peak, size / self.device.memory_bandwidth)

  def _fixed(self, tokens: int) -> "_Fixed":
    """Returns what the number of tokens alone says of a step."""
    model = self.model
    ranks = self.machine.num_ranks if self.machine else 1
    # One position for each token: so are a pair's and a position's share known.
    step = inference.Step(tokens, 1, 1)
    parts = {o.name: o for o in inference.operations(model, step, ranks)}
    attention, head = parts.pop("attention"), parts.pop("head")
    seconds = sum(
      o.count * self._seconds(o.flops, o.bytes) for o in parts.values()
    )
    if self.machine is not None:
      shares = [self.p] * (2 * model.num_layers)
      sent = collections.Counter(inference.messages(model, step, shares))
      seconds += sum(
        count * self.machine.all_reduce(size).least
        for size, count in sent.items()
      )
    return _Fixed(seconds, attention, head)

  def step_s(self, contexts: np.ndarray, chunks: Chunks) -> float:
    """Returns the seconds of a step, as `StepTimes` says."""
    num = len(contexts)
    tokens = num + sum(length for _, length in chunks)
    if tokens not in self._known:
      self._known[tokens] = self._fixed(tokens)
    fixed = self._known[tokens]
    seen = int(contexts.sum()) if num else 0
    pairs = seen + sum(n * start + n * (n + 1) / 2 for start, n in chunks)
    read = seen + sum(start + n for start, n in chunks)
    attention, head = fixed.attention, fixed.head
    return fixed.seconds + attention.count * self._seconds(
      attention.flops * pairs / tokens, attention.bytes * read / tokens
    ) + head.count * self._seconds(
      head.flops * (num + len(chunks)) / tokens, head.bytes
    )


@dataclasses.dataclass(frozen=True)
class _Fixed:
  """What the number of a step's tokens says of its time.

  Attributes:
    seconds: Products of the layers, and all-reduces.
    attention: Of a layer, if each token saw itself alone.
    head: If each token had logits.
  """

  seconds: float
  attention: inference.Operation
  head: inference.Operation
