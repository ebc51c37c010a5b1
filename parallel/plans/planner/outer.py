"""Cost of an outer loop in a plan: step time and memory, in closed form.

Workers are groups of data-parallel ranks that are adjacent in the device order.
They exchange over rings with one device of each worker. The bytes are those of
`parallel.plans.outer.cost`; the slowest link of the slowest ring determines the
time, as for the rings of `parallel.plans.planner.latency`.

Times are those of this project's implementation. DiLoCo exchanges after a
round's last update, without any compute to overlap with. Streaming DiLoCo with
overlap sends at the start of a step, and a collective ends with its program: an
exchange overlaps with one step only, and only with its matrix products, since
other messages use the same links. The model of the paper is in
`caatnet.studies.utilisation.predictor`: an exchange can start in the backward
and span several steps. It never predicts a longer time than this module.
"""

import numpy as np

from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.planner.device_state import fragments
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import Transformer


def sent_bytes(c: Configuration, model: Transformer) -> float:
  """Returns a device's mean operand bytes per step sent to other workers."""
  if c.outer is None:
    return 0.0
  return sum(
    x.operand_bytes
    for rows in fragments(c, model) for x in c.outer.collectives(rows)
  ) / c.outer.sync_every


def memory_bytes(
  c: Configuration, model: Transformer, freed_bytes: float = 0.0
) -> float:
  """Returns an upper bound of a device's bytes for an outer loop.

  These are the loop's state and its exchange buffers
  (`parallel.plans.outer.cost.OuterLoopConfig.exchange_temp_bytes`).

  Args:
    c: The configuration. Without an outer loop the result is 0.
    model: The model.
    freed_bytes: Bytes that a step has freed after its backwards. An exchange
      without overlap reuses them.
  """
  if c.outer is None:
    return 0.0
  found = fragments(c, model)
  passing = c.outer.exchange_temp_bytes(found)
  if not c.outer.overlap:
    # After the last update, activations are free again.
    passing = max(0.0, passing - freed_bytes)
  return c.outer.state_bytes(found) + passing


def exchanges_s(
  c: Configuration, model: Transformer, links: LinkMatrix, order: np.ndarray
) -> list[float]:
  """Returns the seconds of a round's exchanges, one for each fragment.

  Args:
    c: A configuration with an outer loop.
    model: The model.
    links: The cluster.
    order: Device by stage, data and tensor rank, int ``[p, d, t]``.
  """
  workers = c.outer.workers
  # [p, d, t] -> [p, workers, ranks * t]: the next device of a ring has the same
  # position in the next worker.
  rings = order.reshape(c.stages, workers, -1)
  ahead = np.roll(rings, -1, 1)
  latency_s, rate = links.latency_s[rings, ahead], links.bandwidth[rings, ahead]
  found = []
  for rows in fragments(c, model):
    sent = c.outer.collectives(rows)
    steps = sum(x.steps(workers) for x in sent)
    received = sum(x.received_bytes(workers) for x in sent)
    # Slowest link of the slowest ring, [p, workers, ranks * t] -> scalar.
    found.append(float((steps * latency_s + received / rate).max()))
  return found


def exposed_s(
  c: Configuration, model: Transformer, links: LinkMatrix, order: np.ndarray,
  compute_s: float,
) -> float:
  """Returns the mean seconds per step that a device waits for other workers.

  Args:
    c: A configuration with an outer loop.
    model: The model.
    links: The cluster.
    order: Device by stage, data and tensor rank, int ``[p, d, t]``.
    compute_s: Seconds of matrix products of a step, with which an exchange can
      overlap.
  """
  # An exchange overlaps with one step at most, since it ends with its program.
  hidden = compute_s if c.outer.overlap else 0.0
  waits = exchanges_s(c, model, links, order)
  return sum(max(0.0, x - hidden) for x in waits) / c.outer.sync_every
