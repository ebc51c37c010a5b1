"""What a configuration's messages cost between each pair of devices.

A device order gives each coordinate (stage, data, tensor) a device. The part of
a step that depends on it is, in seconds,

    max over pipelines of sum over stages of  chain[i, j]
    + max over all hops of                    hop[i, j]
    + max over all data rings' links of       ring[i, j]
    + max over all tensor groups' links of    reduce[i, j]

with i and j the devices of neighbouring coordinates. The matrices have
everything else in them: sizes, latencies, and how often a message is waited
for in a step (`parallel.planner.latency`). A pipeline's hops add up; rings go
as fast as their slowest link. That of tensor and data coordinates is a ring.

Shape legend: N = devices; O = orders; p, d, t = stages, data, tensor.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
  """How many coordinates there are along each axis: p, d and t."""

  stages: int
  data: int
  tensor: int

  @property
  def size(self) -> int:
    """The number of coordinates."""
    return math.prod(self)

  def __str__(self) -> str:
    return f"stage {self[0]} x data {self[1]} x tensor {self[2]}"


class Family(NamedTuple):
  """Links of one kind.

  Attributes:
    seconds: float64 ``[N, N]``, what a link between two devices costs.
    source: The coordinate that each link goes out of, ``[links]``.
    target: The coordinate that it goes into.
    into: Which link goes into a coordinate, ``[N]``; -1 for none.
    out: Which goes out of it.
    summed: Whether links of a pipeline add up; if not, the slowest counts.
  """

  seconds: np.ndarray
  source: np.ndarray
  target: np.ndarray
  into: np.ndarray
  out: np.ndarray
  summed: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Traffic:
  """The four matrices of a configuration, float64 ``[N, N]``, in seconds.

  Attributes:
    grid: The coordinates; as many as devices.
    chain: A hop from stage to stage, forward and back, as it adds up.
    hop: The same, of which the slowest counts.
    ring: The data ring's reduction, if all links were like this one.
    reduce: All reductions over tensor ranks, likewise.
  """

  grid: Grid
  chain: np.ndarray
  hop: np.ndarray
  ring: np.ndarray
  reduce: np.ndarray

  def families(self) -> tuple[Family, ...]:
    """Returns the links of each kind, without kinds that cost nothing."""
    at = np.arange(self.grid.size).reshape(self.grid)
    ahead = at[:-1].ravel(), at[1:].ravel()
    kinds = (
      (self.chain, *ahead, True), (self.hop, *ahead, False),
      (self.ring, *_around(at, 1), False),
      (self.reduce, *_around(at, 2), False),
    )
    found = []
    for seconds, source, target, summed in kinds:
      if len(source) and seconds.any():
        ends = np.full((2, self.grid.size), -1)
        ends[0, target] = ends[1, source] = np.arange(len(source))
        found.append(Family(seconds, source, target, *ends, summed))
    return tuple(found)


def _around(at: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the links of rings along a dim; none of one coordinate."""
  if at.shape[dim] == 1:
    return at[:0].ravel(), at[:0].ravel()
  return at.ravel(), np.roll(at, -1, dim).ravel()


def parts(traffic: Traffic, orders: np.ndarray) -> np.ndarray:
  """Returns what orders cost, float64 ``[..., 4]``: chain, hop, ring, reduce.

  Args:
    traffic: The messages.
    orders: The device of each coordinate, int ``[..., p, d, t]``.
  """
  x, lead = orders, orders.shape[:-3]
  found = np.zeros((*lead, 4))
  if traffic.grid.stages > 1:
    here, there = x[..., :-1, :, :], x[..., 1:, :, :]
    chain = traffic.chain[here, there].sum(-3)
    found[..., 0] = chain.reshape(*lead, -1).max(-1)
    found[..., 1] = traffic.hop[here, there].reshape(*lead, -1).max(-1)
  for index, dim, matrix in ((2, -2, traffic.ring), (3, -1, traffic.reduce)):
    if x.shape[dim] > 1:
      links = matrix[x, np.roll(x, -1, dim)]
      found[..., index] = links.reshape(*lead, -1).max(-1)
  return found


def cost(traffic: Traffic, orders: np.ndarray) -> np.ndarray:
  """Returns the seconds of orders, float64 ``[...]``; arguments of `parts`."""
  return parts(traffic, orders).sum(-1)
