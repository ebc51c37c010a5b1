"""What an outer loop adds to a device's step and memory, in closed form.

Workers are groups of the data-parallel ranks of a plan, neighbours in its
order of devices. What they exchange goes around rings of one device of each
worker, `parallel.outer.cost` says how much; the slowest link of the slowest
ring decides, as of `parallel.planner.latency`'s rings.

It is priced as it runs. DiLoCo exchanges after a round's last update, when
nothing is left to compute. Streaming DiLoCo with overlap sends at the head of a
step, and a collective cannot outlive its program: so an exchange is hidden
under one step, and under its products only, since other messages take the same
links. `caatnet.studies.utilisation.predictor` is the paper's model, where an
exchange may begin in the backward and go on for several steps: no slower than
this one.
"""

import numpy as np

from parallel.hardware.link_matrix import LinkMatrix
from parallel.planner.device_state import fragments
from parallel.planner.space import Configuration
from parallel.workload import Transformer


def sent_bytes(c: Configuration, model: Transformer) -> float:
  """Returns operand bytes of a device over the axis of workers, per step."""
  if c.outer is None:
    return 0.0
  return sum(
    x.operand_bytes
    for rows in fragments(c, model) for x in c.outer.collectives(rows)
  ) / c.outer.every


def memory_bytes(
  c: Configuration, model: Transformer, freed_bytes: float = 0.0
) -> float:
  """Returns what a device keeps for the outer loop, and holds while it sends.

  It is an upper bound (`parallel.outer.cost.Loop.passing_bytes`).

  Args:
    c: The configuration; without an outer loop there is nothing to keep.
    model: The model.
    freed_bytes: What forwards and backwards leave free when they are done. An
      exchange without overlap comes after them and takes that room.
  """
  if c.outer is None:
    return 0.0
  found = fragments(c, model)
  passing = c.outer.passing_bytes(found)
  if not c.outer.overlap:
    passing = max(0.0, passing - freed_bytes)
  return c.outer.state_bytes(found) + passing


def exchanges_s(
  c: Configuration, model: Transformer, links: LinkMatrix, order: np.ndarray
) -> list[float]:
  """Returns seconds of a round's exchanges, one for each fragment.

  Args:
    c: A configuration with an outer loop.
    model: The model.
    links: The cluster.
    order: The device of each coordinate, int ``[p, d, t]``.
  """
  workers = c.outer.workers
  # [p, d, t] -> [p, workers, ranks and t]: who follows in a ring is a worker
  # further on, at the same place in it.
  rings = order.reshape(c.stages, workers, -1)
  ahead = np.roll(rings, -1, 1)
  latency_s, rate = links.latency_s[rings, ahead], links.bandwidth[rings, ahead]
  found = []
  for rows in fragments(c, model):
    sent = c.outer.collectives(rows)
    steps = sum(x.steps(workers) for x in sent)
    received = sum(x.received_bytes(workers) for x in sent)
    found.append(float((steps * latency_s + received / rate).max()))
  return found


def exposed_s(
  c: Configuration, model: Transformer, links: LinkMatrix, order: np.ndarray,
  compute_s: float,
) -> float:
  """Returns what a step waits for workers, on average over a round, in seconds.

  Args:
    c: A configuration with an outer loop.
    model: The model.
    links: The cluster.
    order: The device of each coordinate, int ``[p, d, t]``.
    compute_s: Seconds of a step's products, under which an exchange runs.
  """
  hidden = compute_s if c.outer.overlap else 0.0
  waits = exchanges_s(c, model, links, order)
  return sum(max(0.0, x - hidden) for x in waits) / c.outer.every
