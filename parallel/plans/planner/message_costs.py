"""Cost of a configuration's messages between each pair of devices.

A device order assigns a device to each coordinate (stage, data, tensor). The
part of a step's time that depends on the order is, in seconds,

    max over pipelines of sum over stages of  chain[i, j]
    + max over all hops of                    hop[i, j]
    + max over all data rings' links of       ring[i, j]
    + max over all tensor groups' links of    reduce[i, j]

with i and j the devices at adjacent coordinates. The matrices include sizes,
latencies, and the number of times that a step waits for a message
(`parallel.plans.planner.latency`). The hops of a pipeline add up; a ring is as
fast as its slowest link. Tensor and data coordinates form rings.

Shape legend: N = devices; O = orders; p, d, t = stages, data, tensor.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
  """Numbers of stages (p), data-parallel ranks (d) and tensor ranks (t)."""

  stages: int
  data: int
  tensor: int

  @property
  def size(self) -> int:
    """Number of coordinates, equal to the number of devices."""
    return math.prod(self)

  def __str__(self) -> str:
    return f"stage {self[0]} x data {self[1]} x tensor {self[2]}"


class CostTerm(NamedTuple):
  """Links that one term of the cost depends on, such as those of data rings.

  Attributes:
    seconds: Cost of a link between two of N devices, float64 ``[N, N]``.
    source: Flat index in the `Grid` at which each link starts, ``[links]``.
    target: Flat index in the `Grid` at which each link ends, ``[links]``.
    into: Index of the link into each position of the grid, ``[N]``; -1 for
      none.
    out: Index of the link out of each position of the grid, ``[N]``; -1 for
      none.
    summed: Whether the links of a pipeline add up; if not, only the slowest
      link matters.
  """

  seconds: np.ndarray
  source: np.ndarray
  target: np.ndarray
  into: np.ndarray
  out: np.ndarray
  summed: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Traffic:
  """Cost matrices of a configuration, float64 ``[N, N]``, in seconds.

  Attributes:
    grid: Grid of the ranks, each of which is on one device.
    chain: Hops between consecutive stages, forward and back, that add up.
    hop: Hops between consecutive stages of which only the slowest matters.
    ring: Collectives of a data ring if all its links are like this one.
    reduce: All all-reduces of a tensor ring if all its links are like this one.

  Example:
    Four devices in two nodes. Crossing nodes costs 9 s per data ring, 1 s
    within a node.

    >>> node = np.arange(4) // 2
    >>> ring = np.where(node[:, None] == node, 1.0, 9.0)
    >>> none = np.zeros((4, 4))
    >>> traffic = Traffic(Grid(1, 2, 2), none, none, ring, none)
    >>> inside, across = [[[0, 2], [1, 3]]], [[[0, 1], [2, 3]]]
    >>> cost(traffic, np.array([inside, across])).tolist()
    [1.0, 9.0]
  """

  grid: Grid
  chain: np.ndarray
  hop: np.ndarray
  ring: np.ndarray
  reduce: np.ndarray

  def families(self) -> tuple[CostTerm, ...]:
    """Returns a term of the cost for each matrix that is not all zeros."""
    at = np.arange(self.grid.size).reshape(self.grid)  # [p, d, t]
    ahead = at[:-1].ravel(), at[1:].ravel()
    # Pipelines are open chains; data and tensor groups are rings.
    kinds = (
      (self.chain, *ahead, True), (self.hop, *ahead, False),
      (self.ring, *_ring_links(at, 1), False),
      (self.reduce, *_ring_links(at, 2), False),
    )
    found = []
    for seconds, source, target, summed in kinds:
      if len(source) and seconds.any():
        # Index of the link into and out of each position of the grid.
        ends = np.full((2, self.grid.size), -1)
        ends[0, target] = ends[1, source] = np.arange(len(source))
        found.append(CostTerm(seconds, source, target, *ends, summed))
    return tuple(found)


def _ring_links(at: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns sources and targets of the links of rings along a dim of a grid.

  ``at`` has the flat index of each coordinate of the grid, and both results
  have such indices, ``[links]``. A ring of one device has no links.
  """
  if at.shape[dim] == 1:
    return at[:0].ravel(), at[:0].ravel()
  return at.ravel(), np.roll(at, -1, dim).ravel()


def costs_by_term(traffic: Traffic, orders: np.ndarray) -> np.ndarray:
  """Returns the seconds of each cost term in some orders, float ``[..., 4]``.

  The terms are those of `Traffic`: chain, hop, ring and reduce.

  Args:
    traffic: Cost matrices of the messages.
    orders: Device by stage, data and tensor rank, int ``[..., p, d, t]``.
  """
  x, lead = orders, orders.shape[:-3]  # [..., p, d, t]
  found = np.zeros((*lead, 4))
  if traffic.grid.stages > 1:
    here, there = x[..., :-1, :, :], x[..., 1:, :, :]
    chain = traffic.chain[here, there].sum(-3)  # over stages: [..., d, t]
    found[..., 0] = chain.reshape(*lead, -1).max(-1)
    found[..., 1] = traffic.hop[here, there].reshape(*lead, -1).max(-1)
  for index, dim, matrix in ((2, -2, traffic.ring), (3, -1, traffic.reduce)):
    if x.shape[dim] > 1:
      # Each coordinate and its successor in the ring.
      links = matrix[x, np.roll(x, -1, dim)]
      found[..., index] = links.reshape(*lead, -1).max(-1)
  return found


def cost(traffic: Traffic, orders: np.ndarray) -> np.ndarray:
  """Returns the summed `costs_by_term` of orders, in seconds, ``[...]``."""
  return costs_by_term(traffic, orders).sum(-1)
