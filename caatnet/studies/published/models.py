"""Published models of a step's time, and Pipette's search, as baselines.

Both follow Pipette's code (arXiv 2405.18093, yimjinkyu1/date2024_pipette,
a2b0683) including its faults, since they serve as baselines. With p stages, m
microbatches, t tensor ranks, k nodes on a ring, width h, vocabulary V, f and b
the times of a microbatch's forward and backward on a stage, a the bytes that it
sends to the next stage, and M the bytes of gradients that a rank reduces:

    g      = m // p            but if m < p: 1, and m - 1 replaces p - 1
    T      = g (T_pp + p (f + b)) + (p - 1) (f + b) + T_intra + T_inter
    T_pp   = max over pipelines of the sum of hops, 2 a / rate each
    T_inter = 2 (k - 1) / k M / the slowest rate on the ring of stage 0's nodes
    T_intra likewise within a node
    M      = bytes (h V + layers 16 h^2) / t
    AMP    = (m - 1) 3 f + T_pp + 3 f p + a flat ring of M at its slowest rate

Both receive f + b as a measurement of one stage would find it
(`latency.predict_measurement`), also for AMP's 3 f: neither model includes
recomputation.

Faults: m // p drops the remainder, there is no latency, and only stage 0 has a
data ring. Pipette's annealing orders nodes, not devices, and minimises T_pp +
T_inter + T_intra, without g. It accepts a worse order with the probability
exp(-change / T), where the change is first divided by its power of ten, so that
its size hardly matters. The original stops after a time limit, this version
after a number of steps.
"""

import math

import numpy as np

from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.planner.latency import predict_measurement
from parallel.plans.planner.problem import Problem
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import Transformer

# parameters of a layer / width^2: 16 for GPT, 12 for BERT
LAYER_PARAMETER_FACTOR = 16
_GRADIENT_BYTES = 4  # float32, as in this project's trainer


def pipette_s(
  c: Configuration, problem: Problem, order: np.ndarray
) -> float:
  """Returns Pipette's prediction of a step, in seconds."""
  both = stage_s(c, problem)
  groups = c.microbatches // c.stages  # g
  waits = c.stages - 1 if groups else c.microbatches - 1  # p - 1, or m - 1
  chain, between, inside = _communication_seconds(c, problem, order)
  return (
    max(1, groups) * (chain + c.stages * both) + waits * both + inside + between
  )


def amp_s(c: Configuration, problem: Problem, order: np.ndarray) -> float:
  """Returns AMP's prediction of a step (arXiv 2210.07297), in seconds."""
  both = stage_s(c, problem)
  chain = _communication_seconds(c, problem, order)[0]
  # Links of the data rings of stage 0, [d, t].
  rates = problem.links.bandwidth[order[0], np.roll(order[0], -1, 0)]
  flat = 0.0
  if c.data > 1:
    state = _reduced_gradient_bytes(c, problem.step.model)
    flat = 2 * (c.data - 1) / c.data * state / rates.min()
  return (c.microbatches - 1 + c.stages) * both + chain + float(flat)


def stage_s(c: Configuration, problem: Problem) -> float:
  """Returns f + b, the seconds of a microbatch, as measured on one stage."""
  return predict_measurement(c, problem.step, problem.links, problem.timing)[1]


def _reduced_gradient_bytes(c: Configuration, model: Transformer) -> float:
  """Returns M, the bytes of gradients that a rank of stage 0 reduces."""
  layers = model.layers_per_part(c.stages)
  size = (
    model.width * model.vocab_size
    + layers * LAYER_PARAMETER_FACTOR * model.width**2
  )
  return _GRADIENT_BYTES * size / c.tensor


def _communication_seconds(
  c: Configuration, problem: Problem, order: np.ndarray
) -> tuple[float, float, float]:
  """Returns the seconds T_pp (pipeline), T_inter and T_intra (gradients)."""
  links = problem.links
  size = problem.step.boundary_bytes(c.examples(problem.step.batch_size))
  hops = 2 * size / links.bandwidth[order[:-1], order[1:]]  # [p - 1, d, t]
  chain = float(hops.sum(0).max()) if c.stages > 1 else 0.0  # T_pp
  if c.data == 1:
    return chain, 0.0, 0.0
  of = np.array(links.nodes)
  between = inside = 0.0
  for ring in order[0].T:  # of stage 0, one for each tensor rank
    nodes = list(dict.fromkeys(of[ring].tolist()))
    state = _reduced_gradient_bytes(c, problem.step.model)
    after = np.roll(ring, -1)
    # Neighbours on the ring in different nodes.
    apart = of[ring] != of[after]
    rates = links.bandwidth[ring, after]
    if len(nodes) > 1:
      k = len(nodes)  # nodes on the ring
      between = max(between, 2 * (k - 1) / k * state / rates[apart].min())
    most = int(np.bincount(of[ring]).max())  # ranks in one node
    if most > 1 and not apart.all():
      inside = max(
        inside, 2 * (most - 1) / most * state / rates[~apart].min()
      )
  return chain, float(between), float(inside)


def pipette_order(
  c: Configuration, problem: Problem, *, steps: int = 5000, seed: int = 0
) -> np.ndarray:
  """Orders nodes by simulated annealing, as Pipette does.

  Moves: reverse a segment of nodes, move a node, swap two nodes, move a
  segment, or move and reverse a segment. The temperature starts at 1 and is
  multiplied by 0.999 in each step.

  Args:
    c: The configuration.
    problem: Training step on the cluster.
    steps: Number of orders that are tried.
    seed: Seed of the random generator.

  Returns:
    Device of each stage, data and tensor rank in the best order, int
    ``[p, d, t]``.
  """
  rng = np.random.default_rng(seed)
  groups = _node_devices(problem.links)

  def devices(order):
    return np.concatenate([groups[i] for i in order]).reshape(c.grid)

  def seconds(order):
    return sum(_communication_seconds(c, problem, devices(order)))

  now = list(range(len(groups)))
  value = best_value = seconds(now)
  best, temperature = now, 1.0
  for _ in range(steps if len(now) > 1 else 0):
    trial = _moved(now, rng)
    found = seconds(trial)
    change = found - value
    if change > 0:  # divided by its power of ten: from 1 to 10
      change /= 10.0 ** math.floor(math.log10(change))
    if change <= 0 or rng.random() < math.exp(-change / temperature):
      now, value = trial, found
    if value < best_value:
      best, best_value = now, value
    temperature *= 0.999
  return devices(best)


def _node_devices(links: LinkMatrix) -> list[np.ndarray]:
  of = np.array(links.nodes)
  return [np.flatnonzero(of == node) for node in np.unique(of)]


def _moved(order: list[int], rng: np.random.Generator) -> list[int]:
  """Returns an order after one of `pipette_order`'s moves, drawn uniformly."""
  # The segment is order[i:j], never empty.
  i, j = sorted(rng.choice(len(order) + 1, 2, replace=False).tolist())
  kind = int(rng.integers(5))
  run, rest = order[i:j], order[:i] + order[j:]
  # Reverses the segment in place.
  if kind == 0:
    return order[:i] + run[::-1] + order[j:]
  # Swaps the ends of the segment.
  if kind == 2:
    swapped = list(order)
    swapped[i], swapped[j - 1] = swapped[j - 1], swapped[i]
    return swapped
  # Moves one node. Kinds 3 and 4 move the segment, 4 also reverses it.
  if kind == 1:
    run, rest = order[i : i + 1], order[:i] + order[i + 1 :]
  if kind == 4:
    run = run[::-1]
  place = int(rng.integers(len(rest) + 1))
  return rest[:place] + run + rest[place:]
