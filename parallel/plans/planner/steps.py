"""Step times of a configuration for many device orders at once.

`latency.predict` predicts the time in one order, by cause. Here values are
arrays over orders, so that all orders of a few devices can be predicted. Both
give the same times, which depend on all links; the cost of `latency.traffic`
depends only on the slowest links.

Shape legend: O = orders; p, d, t = stages, data, tensor.
"""

import functools

import numpy as np

from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.pipeline import simulate
from parallel.plans.pipeline.pipeline_schedule import PipelineSchedule
from parallel.plans.planner import latency
from parallel.plans.planner.device_order import MAX_EXACT_DEVICES, permutations
from parallel.plans.planner.latency import TimingAssumptions
from parallel.plans.planner.memory import cached_schedule
from parallel.plans.planner.message_costs import Grid, costs_by_term
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import TrainingStep


@functools.lru_cache(maxsize=16)
def all_orders(grid: Grid) -> np.ndarray:
  """Returns all orders up to rotations of the rings.

  Device 0 is always at data 0 and tensor 0, since `steps_s` does not change if
  all data or tensor coordinates are shifted cyclically.

  Returns:
    Device by stage, data and tensor rank, int8 ``[O, p, d, t]``.

  Raises:
    ValueError: There are more than ``MAX_EXACT_DEVICES`` devices.

  Example:
    A ring of 3 devices has 3! = 6 orders, of which 2 start with device 0.

    >>> all_orders(Grid(stages=1, data=3, tensor=1))[:, 0, :, 0].tolist()
    [[0, 1, 2], [0, 2, 1]]
  """
  if grid.size > MAX_EXACT_DEVICES:
    raise ValueError(
      f"{grid.size} devices have too many orders; at most {MAX_EXACT_DEVICES} "
      "devices are "
      "allowed"
    )
  orders = permutations(grid.size).astype(np.int8).reshape(-1, *grid)
  # Device 0 at data 0 and tensor 0 of any stage.
  return orders[(orders[:, :, 0, 0] == 0).any(1)]


def steps_s(
  c: Configuration, step: TrainingStep, links: LinkMatrix,
  timing: TimingAssumptions, orders: np.ndarray,
) -> np.ndarray:
  """Returns the seconds of a step in many orders, float64 ``[O]``.

  They equal the totals of `latency.predict` if there is no outer loop.

  Args:
    c: The configuration.
    step: The training step.
    links: The cluster.
    timing: Assumptions about the time of computation and stages.
    orders: Device by stage, data and tensor rank, int ``[O, p, d, t]``.
  """
  costs = latency.traffic(c, step, links, timing.execution)
  # Seconds of all-reduces of each stage per microbatch, [p, O].
  reduce = latency.slowest_links(costs.reduce, orders, -1).T / c.microbatches
  # [O, p] -> [p, O]
  stage_s, again_s = (
    x.T for x in latency.stages(c, step, links, timing.utilisation, orders)
  )
  # Causes that do not depend on the order.
  rest = latency.predict(c, step, links, timing)
  seconds = rest.offload + costs_by_term(costs, orders)[:, 2]
  if c.stages == 1:
    # Without stages, microbatches run one after another.
    alone_s = c.microbatches * (3 * stage_s + again_s + reduce)[0]
    return seconds + rest.vocabulary + alone_s
  table = cached_schedule(c.schedule, c.stages, c.microbatches, c.chunks)[0]
  share, stage_s, again_s = (  # [part, O]
    x[table.stage_of_part] for x in (reduce / 3, stage_s, again_s)
  )
  # Seconds of each kind of action, [kind, part, O]; see `latency._part_times`.
  work = np.stack([
    np.zeros_like(share), stage_s + share,
    2 * stage_s + again_s + 2 * share, stage_s + again_s + 2 * share,
    stage_s + again_s,
  ]) / c.chunks
  hops = links.seconds(latency.messages(c, step).boundary)
  # Seconds of the slowest replica's hop from each stage, [p, O].
  ahead, back = (
    latency.slowest_links(hops, orders, -3, by).T for by in (1, -1)
  )
  if timing.execution == "events":
    pipeline_s = simulate.batched_finish_s(table, work, ahead, back)
    return seconds + rest.vocabulary + pipeline_s
  return seconds + _lockstep_s(table, work, ahead, back) + latency.vocabulary(
    c, step, links, timing, orders
  )


def _lockstep_s(
  table: PipelineSchedule, work: np.ndarray, ahead: np.ndarray, back: np.ndarray
) -> np.ndarray:
  """Returns `simulate.lockstep_s` for many orders, float64 ``[O]``.

  ``table`` is the pipeline schedule. ``work``: seconds of actions by kind, part
  of the model and order, ``[kind, part, O]``; ``ahead``, ``back``: seconds of a
  hop from each of p stages to the next and to the previous one, ``[p, O]``.
  """
  forward, backward = simulate.sends_by_direction(table)
  found = np.zeros(work.shape[-1])
  for kinds, here, out, into in zip(
    table.kinds, table.part_of_actions(), forward, backward, strict=True
  ):
    found += work[kinds, here].max(0)
    # Hops of the stages that send in this tick, [sends, O].
    sent = np.concatenate([ahead[out], back[into]])
    found += sent.max(0) if len(sent) else 0.0
  return found
