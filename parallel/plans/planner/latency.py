"""Prediction of the time of a training step on a matrix of links, by cause.

Compute is the roofline of a layer (`TrainingStep.layer_s`); a stage, and the
head, are as fast as the slowest of their devices. A backward has twice the
matrix products of a forward. Forwards that a backward repeats are added, with
their all-reduces: the whole part in stages that save only inputs, and each
layer once more with rematerialization. If tensor ranks synchronise all channels
(``Configuration.p`` = 1), nothing overlaps with their all-reduces, since a
row-parallel projection has no private columns to compute meanwhile
(`parallel.tensor.projections`). The overlap with smaller p is not modelled.

Stages run in lockstep, as one program, where a tick takes the time of its
longest action and then of its longest hop; or independently ("events"), as
separate processes. In lockstep all stages also compute embedding and head
together, for which the residual stream is all-reduced over the stages four
times per microbatch, by rings (`parallel.pipeline.run`). With "events" nothing
is sent for them, and each stage computes an equal part.

After the pipeline, the data ring of every stage sends the bytes that
`parallel.plans.zero.cost` gives; the slowest link of the slowest stage
determines the time. A ring of k ranks whose slowest link has a bandwidth of b
bytes/s and a latency of a seconds all-reduces n bytes in 2 (k - 1) (a + n /
(k b)) seconds; "one_shot" sends all partial sums to all ranks at once.

Not modelled: gathers that overlap with compute, encoding, data loading.
"""

import collections
import dataclasses
import functools

import numpy as np

from parallel.base import checks
from parallel.plans.hardware import tiers
from parallel.plans.hardware.devices import Device
from parallel.plans.hardware.link_matrix import LinkMatrix, Links
from parallel.plans.hardware.tiers import Host
from parallel.plans.pipeline import simulate
from parallel.plans.planner import outer
from parallel.plans.planner.device_state import parameters, partition
from parallel.plans.planner.memory import cached_schedule
from parallel.plans.planner.message_costs import Traffic
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import TrainingStep
from parallel.plans.zero import cost as zero_cost

EXECUTIONS = ("lockstep", "events")
# All-reduces of a microbatch's residual stream over the stages: of the first
# part's input, of the last part's output, and of the cotangents of both.
VOCABULARY_REDUCTIONS = 4
DEFAULT_HOST = tiers.HOSTS[
  "dgx-a100"
]  # assumed host if optimizer state is offloaded


@dataclasses.dataclass(frozen=True)
class TimingAssumptions:
  """Assumptions about the time of computation and of stages.

  Attributes:
    utilisation: Fraction of the peak FLOP/s that matrix products reach.
    execution: "lockstep" (stages in one program) or "events" (independent).
    host: Host of each device, which holds an offloaded optimizer state.

  Raises:
    ValueError: The execution is unknown.
  """

  utilisation: float = 0.5
  execution: str = "lockstep"
  host: Host = DEFAULT_HOST

  def __post_init__(self) -> None:
    checks.known("execution=", self.execution, EXECUTIONS)


@dataclasses.dataclass(frozen=True)
class Latency:
  """Seconds of a step by cause.

  Attributes:
    compute: Forwards and backwards of all microbatches on a stage.
    again: Forwards that backwards repeat.
    tensor: All-reduces over tensor ranks.
    bubble: Idle time of stages if hops between stages took no time.
    hops: Additional time because hops between stages take time.
    vocabulary: Embedding and head, and the stages' all-reduces for them.
    data: Collectives of the slowest stage over data-parallel ranks.
    offload: Transfers of the optimizer's state from host memory and back.
    outer: Exchanges between workers that do not overlap with a step
      (`parallel.plans.planner.outer`).
  """

  compute: float
  again: float
  tensor: float
  bubble: float
  hops: float
  vocabulary: float
  data: float
  offload: float
  outer: float = 0.0

  @property
  def total(self) -> float:
    """Seconds of the whole step."""
    return sum(vars(self).values())


@dataclasses.dataclass(frozen=True)
class Messages:
  """Sizes and numbers of a configuration's messages in a step.

  Attributes:
    boundary: Bytes that a hop sends from one stage to the next.
    reductions: Pairs (bytes, number per microbatch, in its forward and backward
      together) of all-reduces over tensor ranks, on one stage.
    exchanges: Pair (bytes received, number of ring steps) of a rank in all
      collectives of a step over data-parallel ranks.
  """

  boundary: float
  reductions: tuple[tuple[float, float], ...]
  exchanges: tuple[float, int]


@functools.lru_cache(maxsize=64)
def messages(c: Configuration, step: TrainingStep) -> Messages:
  """Returns the sizes and numbers of a configuration's messages in a step."""
  model, examples = step.model, c.examples(step.batch_size)
  stream = step.boundary_bytes(examples)
  layers = c.chunks * model.layers_per_part(c.stages * c.chunks)
  # Bytes of the stream's cotangents, in the dtype of the backward reduction.
  wide = stream * step.backward_bytes / model.item_bytes
  # Two row-parallel projections per layer, forward and backward. A stage that
  # repeats its forward repeats both reductions. Rematerialization of a layer
  # repeats the first one ("full") or none ("reduced"). Without stages the
  # embedding adds one; with stages the vocabulary's sums include it.
  forward = 2 + (2 if _recomputes(c) else 0) + (c.remat == "full")
  enters = int(c.stages == 1)
  # Row-parallel projections reduce int(p x width) channels
  # (`PartialSync.num_shared`), the embedding all channels.
  share = int(c.p * model.width) / model.width
  reductions: collections.Counter[float] = collections.Counter()
  for size, times in ((stream, forward * layers), (wide, 2 * layers)):
    reductions[share * size] += times
    reductions[size] += enters
  found = zero_cost.level_collectives(
    partition(c), parameters(c, model), accumulation=c.microbatches
  )
  received = sum(e.received_bytes for e in found)
  # Tensors of a kind and phase are sent together; microbatches send separately.
  rounds = sum(
    (1 if e.when == "step" else c.microbatches)
    * (2 if e.kind == "all_reduce" else 1) for e in found
  )
  return Messages(
    stream, tuple(x for x in reductions.items() if all(x)),
    (received, rounds * (c.ranks - 1)),
  )


def traffic(
  c: Configuration, step: TrainingStep, links: LinkMatrix, execution: str
) -> Traffic:
  """Returns the cost of a configuration's messages between all device pairs.

  A hop's time is multiplied by the number of times that a step waits for it.
  With "lockstep", each tick that sends in a direction waits for the slowest
  hop. With "events", the number for 1F1B is that in
  `parallel.plans.pipeline.cost.exposed_s`; other schedules wait once in each
  direction, to fill and to drain the pipeline.

  Args:
    c: The configuration.
    step: The training step.
    links: The cluster.
    execution: One of ``EXECUTIONS``.
  """
  sent, all_links = messages(c, step), Links(links.latency_s, links.bandwidth)
  none = np.zeros_like(links.latency_s)
  p, m = c.stages, c.microbatches
  chain = hop = ring = reduce = none
  if p > 1:
    hops = links.seconds(sent.boundary)  # [N, N]
    both = hops + hops.T  # forward and back
    rounds, left = divmod(m - 1, p)
    if execution == "lockstep":
      table = cached_schedule(c.schedule, p, m, c.chunks)[0]
      ahead, back = (x.any(1) for x in simulate.sends_by_direction(table))
      # Ring steps of the vocabulary's sums, each with 1 / p of the stream.
      share = VOCABULARY_REDUCTIONS * 2 * (p - 1) * m
      # Ticks that send forward only, backward only, and both ways.
      hop = (
        (ahead & ~back).sum() * hops + (back & ~ahead).sum() * hops.T
        + (ahead & back).sum() * np.maximum(hops, hops.T)
      )
      hop = hop + share * links.seconds(sent.boundary / p)
    elif c.schedule == "1f1b":
      chain, hop = (rounds + 1) * both, max(0, left - 1) * both
    else:
      chain = both
  if c.ranks > 1:
    ring = _exchanges(sent, all_links)
  if c.tensor > 1:
    reduce = m * _reductions(c, sent, all_links)
  return Traffic(c.grid, chain, hop, ring, reduce)


def _exchanges(sent: Messages, links: Links) -> np.ndarray:
  """Returns, per link, the seconds of a data ring whose links all equal it.

  They are those of a step's collectives over data-parallel ranks, ``sent``.
  """
  received, steps = sent.exchanges
  return steps * links.latency_s + received / links.bandwidth


def _reductions(c: Configuration, sent: Messages, links: Links) -> np.ndarray:
  """Returns, per link, a microbatch's seconds of all-reduces over tensor ranks.

  All links of a tensor ring are assumed to equal this link; ``sent`` has the
  sizes of the all-reduces.
  """
  found = np.zeros_like(links.latency_s)
  for size, times in sent.reductions:
    found = found + times * _reduction(links, size, c.tensor, c.route)
  return found


def _reduction(
  links: Links, size: float, ranks: int, route: str
) -> np.ndarray:
  """Returns, per link, the seconds of an all-reduce over links equal to it.

  It is of ``size`` bytes over ``ranks`` ranks; ``route`` is its algorithm.
  """
  if route == "one_shot":
    return links.latency_s + (ranks - 1) * size / links.bandwidth
  return 2 * (ranks - 1) * links.seconds(size / ranks)


def slowest_links(
  matrix: np.ndarray, order: np.ndarray, dim: int, by: int = 1
) -> np.ndarray:
  """Returns the time of the slowest link of rings along a dim, for each stage.

  Args:
    matrix: Time of the link between each pair of N devices, ``[N, N]``.
    order: Device by stage, data and tensor rank, int ``[..., p, d, t]``.
    dim: Dim of ``order`` along which devices form rings: -3, -2 or -1.
    by: Distance on the ring from the device that sends to the one that
      receives.

  Returns:
    float64 ``[..., stages]``; zeros for a dim of one device.
  """
  if order.shape[dim] == 1:
    return np.zeros(order.shape[:-2])
  return matrix[order, np.roll(order, -by, dim)].max((-2, -1))


def predict(
  c: Configuration, step: TrainingStep, links: LinkMatrix,
  timing: TimingAssumptions, order: np.ndarray | None = None,
) -> Latency:
  """Predicts the seconds of a step.

  Args:
    c: The configuration, one that `space.violated_constraint` accepts.
    step: The training step.
    links: The cluster.
    timing: Assumptions about the time of computation and stages.
    order: Device by stage, data and tensor rank, int ``[p, d, t]``; None for
      the default order.
  """
  if order is None:
    order = np.arange(c.grid.size).reshape(c.grid)
  sent, m, p = messages(c, step), c.microbatches, c.stages
  reduce_s = np.zeros(p)  # per microbatch
  if c.tensor > 1:
    reduce_s = _reductions(
      c, sent, _links_along(links, order, -1)
    ).max((-2, -1))
  stage_s, again_s = stages(c, step, links, timing.utilisation, order)
  busiest = int((3 * stage_s + again_s + reduce_s).argmax())
  compute_s, repeated_s, sums_s = (
    float(m * x[busiest]) for x in (3 * stage_s, again_s, reduce_s)
  )
  bubble_s = hops_s = 0.0
  if p > 1:
    work = _part_times(c, stage_s, again_s, reduce_s)
    alone = simulate.even_stage_links(p)
    # Each hop is that of the slowest replica. The last stage's hop leads to the
    # first one; only chunked schedules use it.
    both = (
      _links_along(links, order, -3, by).seconds(
        sent.boundary
      ) for by in (1, -1)
    )
    way = simulate.StageLinks(*(tuple(x.max((-2, -1)).tolist()) for x in both))
    without_s, with_s = (
      _simulate_pipeline(c, work, x, timing.execution) for x in (alone, way)
    )
    # The pipeline is simulated without and with hops, for the breakdown.
    hops_s = with_s - without_s
    bubble_s = without_s - compute_s - repeated_s - sums_s
  ring_s = 0.0
  if c.ranks > 1:
    # The ranks of each worker form a separate ring.
    # [p, d, t] -> [p * workers, ranks, t]
    ring = _links_along(links, order.reshape(-1, c.ranks, c.tensor), -2)
    ring_s = float(_exchanges(sent, ring).max())
  exchanged_s = 0.0 if c.outer is None else outer.exposed_s(
    c, step.model, links, order, compute_s + repeated_s
  )
  return Latency(
    compute=compute_s, again=repeated_s, tensor=sums_s, bubble=bubble_s,
    hops=hops_s, vocabulary=float(vocabulary(c, step, links, timing, order)),
    data=ring_s,
    offload=_offload(c, step, timing.host), outer=exchanged_s,
  )


def _links_along(
  links: LinkMatrix, order: np.ndarray, dim: int, by: int = 1
) -> Links:
  """Returns the links of the rings that devices form along a dim of ``order``.

  Other arguments are those of `slowest_links`.
  """
  return links.between(order, np.roll(order, -by, dim))


def stages(
  c: Configuration, step: TrainingStep, links: LinkMatrix, utilisation: float,
  order: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the seconds of each stage's forward and of its repeated forwards.

  Both are per microbatch, on the slowest device of a stage, and without
  all-reduces.

  Args:
    c: The configuration.
    step: The training step.
    links: The cluster.
    utilisation: Fraction of the peak FLOP/s that matrix products reach.
    order: Device by stage, data and tensor rank, int ``[..., p, d, t]``.

  Returns:
    Two arrays, float64 ``[..., stages]``.
  """
  layers = step.model.layers_per_part(c.stages * c.chunks) * c.chunks
  of_device = layers * links.per_device(lambda device: step.layer_s(
    c.examples(step.batch_size), c.tensor, device, utilisation
  ))
  stage_s = of_device[order].max((-2, -1))
  return stage_s, (_recomputes(c) + (c.remat != "none")) * stage_s


def _recomputes(c: Configuration) -> bool:
  """Returns whether a stage's backward repeats its forward."""
  return c.stages > 1 and c.keep == "inputs"


def predict_measurement(
  c: Configuration, step: TrainingStep, links: LinkMatrix,
  timing: TimingAssumptions
) -> tuple[float, float]:
  """Predicts the times that a measurement of one stage would give.

  The stage runs on the first devices of the cluster. Planners that model only
  the pipeline take their times from such a measurement.

  Returns:
    Seconds of a microbatch's forward, and of its forward and backward together:
    matrix products, repeated forwards, all-reduces over tensor ranks, and the
    stage's part of the head.
  """
  first = np.arange(c.tensor).reshape(1, 1, -1)
  stage_s, again_s = (
    float(x[0]) for x in stages(c, step, links, timing.utilisation, first)
  )
  head_s = _head(c, step, links.device, timing.utilisation)
  reduce_s = 0.0
  if c.tensor > 1:
    sums_s = _reductions(c, messages(c, step), _links_along(links, first, -1))
    reduce_s = float(sums_s.max())
  # A backward takes twice as long as a forward; a third of all-reduces and head
  # belongs to the forward.
  both = 3 * stage_s + again_s + reduce_s + head_s
  return stage_s + (reduce_s + head_s) / 3, both


def _part_times(
  c: Configuration, stage_s: np.ndarray, again_s: np.ndarray,
  reduce_s: np.ndarray,
) -> simulate.PartTimes:
  """Returns the seconds of each model part's forward, backward and halves.

  ``stage_s``, ``again_s`` and ``reduce_s`` are a microbatch's seconds on each
  stage: of the forward, of repeated forwards and of all-reduces.

  A third of the all-reduces counts as forward: those of backwards may have a
  wider dtype, and backwards may repeat forwards. Each half of a split backward
  repeats the forward if there are repeated forwards.
  """
  shares = []
  table = cached_schedule(c.schedule, c.stages, c.microbatches, c.chunks)[0]
  for compute, again, reduce in zip(
    *(x[table.stage_of_part].tolist() for x in (stage_s, again_s, reduce_s)),
    strict=True,
  ):
    shares.append([
      (compute + reduce / 3) / c.chunks,
      (2 * compute + again + 2 * reduce / 3) / c.chunks,
      (compute + again + 2 * reduce / 3) / c.chunks,
      (compute + again) / c.chunks,
    ])
  return simulate.PartTimes(*(tuple(x) for x in zip(*shares, strict=True)))


def _simulate_pipeline(
  c: Configuration, work: simulate.PartTimes, hops: simulate.StageLinks,
  execution: str,
) -> float:
  # Cached by the schedule's sizes, which many configurations have in common.
  table = cached_schedule(c.schedule, c.stages, c.microbatches, c.chunks)[0]
  if execution == "lockstep":
    return simulate.lockstep_s(table, work, hops)
  return _simulate_events(table, work, hops)


@functools.lru_cache(maxsize=4096)
def _simulate_events(
  table: object, work: simulate.PartTimes, hops: simulate.StageLinks
) -> float:
  """Returns the seconds of the schedule ``table``, as `simulate.events` does.

  The result is cached, since many configurations have equal arguments.
  """
  return simulate.events(table, work, hops).finish_s


def vocabulary(
  c: Configuration, step: TrainingStep, links: LinkMatrix,
  timing: TimingAssumptions, order: np.ndarray,
) -> np.ndarray:
  """Returns the seconds of embedding and head, with the stages' all-reduces.

  Args:
    c: The configuration.
    step: The training step.
    links: The cluster.
    timing: Assumptions about the time of computation and stages.
    order: Device by stage, data and tensor rank, int ``[..., p, d, t]``.

  Returns:
    Seconds of a step, float64 ``[...]``.
  """
  sums_s = np.zeros(order.shape[:-3])
  if c.stages > 1 and timing.execution == "lockstep":
    size = step.boundary_bytes(c.examples(step.batch_size))
    hops = links.between(order[..., :-1, :, :], order[..., 1:, :, :])
    hops_s = _reduction(hops, size, c.stages, "psum")
    sums_s = VOCABULARY_REDUCTIONS * hops_s.max((-3, -2, -1))
  head_s = _head(c, step, links.device, timing.utilisation)
  return c.microbatches * (head_s + sums_s)


def _head(
  c: Configuration, step: TrainingStep, device: Device, utilisation: float
) -> float:
  """Returns the seconds of the output head, forward and backward.

  They are those of a microbatch; ``utilisation`` is the fraction of the peak
  FLOP/s that products reach.
  """
  flops = 3 * step.head_flops(  # a backward has twice the forward's products
    c.examples(step.batch_size), c.stages * c.tensor
  )
  return flops / (utilisation * device.peak(step.model.dtype))


def _offload(c: Configuration, step: TrainingStep, host: Host) -> float:
  """Returns the seconds per step to move the moments to and from the host."""
  if not c.offload:
    return 0.0
  found = parameters(c, step.model, step.moments)
  moved = zero_cost.memory(partition(c), found).moments
  return moved / host.to_device + moved / host.from_device
