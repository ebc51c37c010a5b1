"""Exact planner of nano-batches, parts of a step's tokens that overlap in time.

A layer of a tensor-parallel model has an attention block and an MLP, each
followed by an all-reduce (its *reduction*). Each of the four operations waits
for the one before it. If a step is cut into nano-batches ("pieces" in the
code), the reduction of one nano-batch can run during the products of another.
Each nano-batch reads the weights again and multiplies fewer rows. Below a
break-even size this costs more than it saves; the plan is then a single batch.

The planner times the order in which `caatnet.models.lm.pieces` executes a layer
of m nano-batches::

    device     A_1  A_2 ... A_m  M_1 ... M_m
    network    S_m  R_1 ... R_m  S_1 ... S_{m-1}

A_j and M_j are the attention block and the MLP of nano-batch j, R_j and S_j
their reductions; the first S_m belongs to the layer before. R_j waits for A_j,
S_j for M_j, M_j for R_j, A_m for S_m, and each reduction for the one before it.
While device and network are both busy, each runs at the rate 1 / (1 +
interference). In the executor a row-parallel product also waits until the
reduction before it has ended; the planner ignores this.

The search is exact on a grid of sizes: it appends one nano-batch after another,
discards plans whose lower bound is not below the best time so far, and
simulates the rest. Two lower bounds on the time of a layer, with its device
time D and its network time N, are::

    max(D, N) + interference min(D, N)
    A_1 + ... + A_j + R_j + M_j + ... + M_m        for each j

Source: NanoFlow (Zhu et al., OSDI 2025, arXiv 2408.12757), which searches with
a mixed-integer program. Deviations: two resources (XLA runs attention and
products on one stream), one parameter of interference instead of a table, and
a proof of optimality on the grid.

Example:
  >>> import numpy as np
  >>> from parallel.plans.nanobatches import nanobatch
  >>> tokens = np.arange(1025)
  >>> weights = np.where(tokens, 100e-6, 0)  # to read the weights once
  >>> costs = nanobatch.Costs(
  ...   "example", 2, attention=np.maximum(weights, 0.3e-6 * tokens),
  ...   mlp=np.maximum(weights, 0.7e-6 * tokens),
  ...   reductions={nanobatch.Reduction(): np.where(tokens, 20e-6, 0)
  ...               + 0.3e-6 * tokens},
  ... )
  >>> len(nanobatch.plan(costs, 1024).sizes), nanobatch.plan(costs, 64).sizes
  (3, (64,))
"""

from collections.abc import Mapping
import dataclasses
import math

import numpy as np

from parallel.base.checks import at_least, fraction

# For one reduction, 4.2 million plans of at most six nano-batches take 6 s and
# 1.2 GB if the lower bounds exclude few, and 10 ms if they exclude most.
_MAX_PLANS = 10**7
# Number of plans that one call of `step_seconds` simulates.
_PLANS_PER_CALL = 4096
# Times with a smaller relative difference are equal up to rounding errors.
_RELATIVE_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True, order=True)
class Reduction:
  """Kind of all-reduce that sums a row-parallel product over tensor ranks.

  Attributes:
    algorithm: Name of the all-reduce's algorithm.
    p: Fraction of the channels that are summed.
    bits: Bits per summed channel on the wire.
  """

  algorithm: str = "all_reduce"
  p: float = 1.0
  bits: int = 16


@dataclasses.dataclass(frozen=True)
class Costs:
  """Times of one layer on one device by the number of tokens, in seconds.

  Arrays have the shape ``[tokens + 1]`` and begin with 0; entry n is the time
  of n tokens. They need not be monotone.

  Attributes:
    model: Name of the model.
    num_layers: Number of layers.
    attention: Time of the attention block's products, norms and attention,
      without its reduction.
    mlp: Time of the MLP's products and norm, without its reduction.
    reductions: Times of each reduction that the plan may choose.
    attend: Cumulative time of attention over the first n tokens, which is added
      to `attention`; None if `attention` contains it.
    fixed_s: Time of a step outside of layers: embedding and head.
    optimum_s: Time of a step at the peak rates of the hardware, if compute,
      memory and network overlap fully; 0 if unknown.
  """

  model: str
  num_layers: int
  attention: np.ndarray
  mlp: np.ndarray
  reductions: Mapping[Reduction, np.ndarray]
  attend: np.ndarray | None = None
  fixed_s: float = 0.0
  optimum_s: float = 0.0

  def __post_init__(self) -> None:
    at_least("num_layers", self.num_layers)
    if not self.reductions:
      raise ValueError(
        f"the costs of {self.model} must have the times of at least one "
        "reduction"
      )
    tables = {"attention": self.attention, "mlp": self.mlp}
    tables |= {str(key): times for key, times in self.reductions.items()}
    if self.attend is not None:
      tables["attend"] = self.attend
    for name, times in tables.items():
      self._check(name, times)

  def _check(self, name: str, times: np.ndarray) -> None:
    if times.shape != self.mlp.shape:
      raise ValueError(
        f"the costs of {self.model}: {name} has times up to {len(times) - 1} "
        f"tokens; it must have times up to {len(self.mlp) - 1} tokens, as mlp "
        "has"
      )
    # Attention without cached positions and reductions of no channels take no
    # time; products always take time.
    least = 0 if name not in ("attention", "mlp") else np.nextafter(0, 1)
    bad = ~(np.isfinite(times) & (times >= least))
    bad[0] = times[0] != 0
    if bad.any():
      at = int(bad.argmax())
      raise ValueError(
        f"the costs of {self.model}: {name} of {at} tokens takes {times[at]} "
        "s; the time must be 0 for no tokens, and positive for others"
      )

  @property
  def max_tokens(self) -> int:
    """Largest number of tokens for which there are times."""
    return len(self.mlp) - 1


@dataclasses.dataclass(frozen=True)
class NanobatchPlan:
  """Plan that cuts one step into nano-batches.

  Attributes:
    sizes: Tokens of each nano-batch, in token order; one size if uncut.
    model: Name of the model whose costs it minimises.
    reduction: Selected reduction.
    step_s: Predicted seconds of the step.
    single_s: Predicted seconds of the uncut step with its fastest reduction.
    optimum_s: Seconds at the peak rates of the hardware (`Costs.optimum_s`).
    considered: Number of plans in the search space.
    simulated: Number of plans that bounds did not exclude.
  """

  sizes: tuple[int, ...]
  model: str
  reduction: Reduction
  step_s: float
  single_s: float
  optimum_s: float = 0.0
  considered: int = 1
  simulated: int = 1

  def __post_init__(self) -> None:
    if not self.sizes or min(self.sizes) < 1:
      raise ValueError(f"sizes={self.sizes} must be positive")

  @property
  def gain(self) -> float:
    """Throughput relative to that of the uncut step."""
    return self.single_s / self.step_s

  def check(self, model: str, num_tokens: int) -> None:
    """Checks that the plan fits a step.

    Raises:
      ValueError: The plan is for another model or number of tokens.
    """
    if model != self.model:
      raise ValueError(
        f"the plan is for the model {self.model} and cannot run {model}; make "
        "a plan for this model"
      )
    if sum(self.sizes) != num_tokens:
      raise ValueError(
        f"the plan is for {sum(self.sizes)} tokens and cannot run "
        f"{num_tokens}; make a plan for this number of tokens"
      )


def plan(
  costs: Costs, num_tokens: int, *, max_pieces: int = 4,
  granularity: int | None = None, interference: float = 0.0,
) -> NanobatchPlan:
  """Returns the fastest plan; of equal ones, that with fewest nano-batches.

  Args:
    costs: Times of a layer.
    num_tokens: Tokens of the step.
    max_pieces: Largest number of nano-batches that the executor runs.
    granularity: Every size but the last is a multiple of this number of tokens;
      None for 1/64 of the tokens, rounded up.
    interference: Slowdown while device and network are both busy, from 0
      (independent) to 1 (overlap gains nothing).

  Raises:
    ValueError: A number is out of range, the costs do not cover the tokens, or
      there are more than ten million plans.
  """
  at_least("num_tokens", num_tokens)
  at_least("max_pieces", max_pieces)
  fraction("interference", interference)
  if num_tokens > costs.max_tokens:
    raise ValueError(
      f"num_tokens={num_tokens} must be at most {costs.max_tokens}, the "
      f"largest number of tokens in the costs of {costs.model}"
    )
  if granularity is None:
    granularity = math.ceil(num_tokens / 64)
  at_least("granularity", granularity)
  num_cuts = (num_tokens - 1) // granularity
  chosen = range(1, min(max_pieces, num_cuts + 1))
  if sum(math.comb(num_cuts, count) for count in chosen) > _MAX_PLANS:
    raise ValueError(
      f"max_pieces={max_pieces} leads to more than {_MAX_PLANS:,} plans of "
      f"{num_tokens} tokens in steps of {granularity} tokens; reduce max_pieces"
    )
  singles = {
    key: float(step_seconds(costs, key, [num_tokens], interference))
    for key in costs.reductions
  }
  reduction = min(singles, key=singles.__getitem__)
  best, best_s, single_s = (num_tokens,), singles[reduction], singles[reduction]
  considered, simulated = len(singles), len(singles)
  cuts = np.append(granularity * np.arange(num_cuts + 1), num_tokens)
  for count in chosen:
    for key in costs.reductions:
      considered += math.comb(num_cuts, count)
      sizes = _candidates(costs, key, cuts, count + 1, interference, best_s)
      bounds = _lower_bounds(costs, key, sizes, interference)
      order = np.argsort(bounds, kind="stable")
      for start in range(0, len(order), _PLANS_PER_CALL):
        chunk = order[start:start + _PLANS_PER_CALL]
        chunk = chunk[bounds[chunk] < best_s]
        if not len(chunk):
          break
        simulated += len(chunk)
        seconds = step_seconds(costs, key, sizes[chunk], interference)
        at = int(seconds.argmin())
        if seconds[at] < best_s * (1 - _RELATIVE_TOLERANCE):
          best, best_s = tuple(map(int, sizes[chunk[at]])), float(seconds[at])
          reduction = key
  return NanobatchPlan(
    best, costs.model, reduction, best_s, single_s,
    costs.optimum_s, considered, simulated,
  )


def step_seconds(
  costs: Costs, reduction: Reduction, sizes: np.ndarray | list[int],
  interference: float,
) -> np.ndarray:
  """Returns the times of steps in seconds, ``[...]``.

  Args:
    costs: Times of a layer.
    reduction: Reduction of all nano-batches, a key of `Costs.reductions`.
    sizes: Tokens of each nano-batch, ``[..., nano-batches]``.
    interference: Slowdown of device and network, see `plan`.
  """
  sizes = np.asarray(sizes)
  cut = sizes.reshape(-1, sizes.shape[-1])
  attention, mlp, sums = _operation_seconds(costs, reduction, cut)
  last = sums[:, -1]
  layer = _layer_seconds(attention, mlp, sums, last, interference)
  first = _layer_seconds(attention, mlp, sums, 0 * last, interference)
  # No reduction is pending at the start of the first layer. The last reduction
  # of the last layer runs after the scan over layers, without overlap.
  total = costs.fixed_s + first + (costs.num_layers - 1) * layer + last
  return total.reshape(sizes.shape[:-1])


def _operation_seconds(
  costs: Costs, reduction: Reduction, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns three arrays like ``sizes``: attention, MLP, reduction seconds.

  ``sizes`` are the tokens of nano-batches.
  """
  attention = costs.attention[sizes]
  if costs.attend is not None:
    ends = sizes.cumsum(-1)
    attention = attention + costs.attend[ends] - costs.attend[ends - sizes]
  return attention, costs.mlp[sizes], costs.reductions[reduction][sizes]


def _candidates(
  costs: Costs, reduction: Reduction, cuts: np.ndarray, pieces: int,
  interference: float, best_s: float,
) -> np.ndarray:
  """Returns sizes that may beat the best plan, ``[plans, nano-batches]``.

  Plans are built one nano-batch at a time. A partial plan is dropped if a lower
  bound, from its times and the smallest times of the remaining nano-batches, is
  not below ``best_s``.

  Args:
    costs: Times of a layer.
    reduction: Reduction of all nano-batches.
    cuts: Tokens at which a nano-batch may begin or end, ascending from 0 to the
      number of tokens, int ``[n + 1]``.
    pieces: Number of nano-batches.
    interference: Slowdown of device and network, see `plan`.
    best_s: Seconds of a step with the best plan so far.
  """
  last = len(cuts) - 1
  # Times of the nano-batch from cut i to cut j, [n + 1, n + 1]; inf if i >= j.
  sizes = np.maximum(cuts[None] - cuts[:, None], 0)
  attention, mlp, sums = (
    np.where(sizes > 0, times[sizes], np.inf)
    for times in (costs.attention, costs.mlp, costs.reductions[reduction])
  )
  if costs.attend is not None:
    attention += costs.attend[cuts][None] - costs.attend[cuts][:, None]
  # least[k]: smallest device, network and MLP times of k nano-batches from each
  # cut to the end, [3, n + 1].
  kinds = attention + mlp, sums, mlp
  least = [np.full((3, last + 1), np.inf)]
  least[0][:, last] = 0
  for _ in range(pieces - 1):
    least.append(np.stack([
      (kind + rest).min(1) for kind, rest in zip(kinds, least[-1], strict=True)
    ]))
  chosen = np.zeros((1, 1), int)  # cuts so far, [plans, nano-batches + 1]
  device = network = read = path = np.zeros(1)
  for left in reversed(range(pieces)):
    start = chosen[:, -1]
    # The next nano-batch may end at any cut that leaves enough cuts after it.
    first = start + 1 if left else np.full_like(start, last)
    count = last - left + 1 - first
    of = np.repeat(np.arange(len(start)), count)
    end = np.arange(len(of)) + (first - count.cumsum() + count)[of]
    start = start[of]
    device = device[of] + attention[start, end] + mlp[start, end]
    network = network[of] + sums[start, end]
    read = read[of] + attention[start, end]
    path = mlp[start, end] + np.maximum(path[of], read + sums[start, end])
    more = least[left][:, end]
    own, sent = device + more[0], 2 * (network + more[1])
    layer = np.maximum(
      np.maximum(own, sent) + interference * np.minimum(own, sent),
      path + more[2],
    )
    bound = costs.fixed_s + costs.num_layers * layer
    # The tolerance is looser than in `_lower_bounds`, which are applied later.
    kept = np.flatnonzero(bound * (1 - 2 * _RELATIVE_TOLERANCE) < best_s)
    chosen = np.column_stack([chosen[of[kept]], end[kept]])
    device, network, read, path = (
      x[kept] for x in (device, network, read, path)
    )
  return np.diff(cuts[chosen], axis=1)


def _lower_bounds(
  costs: Costs, reduction: Reduction, sizes: np.ndarray, interference: float
) -> np.ndarray:
  """Returns lower bounds on the seconds of steps, ``[plans]``.

  ``sizes`` are the tokens of each nano-batch, ``[plans, nano-batches]``; other
  arguments are those of `step_seconds`.
  """
  attention, mlp, sums = _operation_seconds(costs, reduction, sizes)
  device = attention.sum(-1) + mlp.sum(-1)
  # Attention of nano-batches 1 to j, reduction j, MLPs from j on, for each j.
  paths = attention.cumsum(-1) + sums + mlp[:, ::-1].cumsum(-1)[:, ::-1]
  path, last = paths.max(-1), sums[:, -1]

  def layer(network: np.ndarray) -> np.ndarray:
    both = np.minimum(device, network)
    return np.maximum(
      np.maximum(device, network) + interference * both, path
    )

  network = 2 * sums.sum(-1)
  bound = layer(network - last) + (costs.num_layers - 1) * layer(network) + last
  return costs.fixed_s + bound * (1 - _RELATIVE_TOLERANCE)


def _layer_seconds(
  attention: np.ndarray, mlp: np.ndarray, sums: np.ndarray, pending: np.ndarray,
  interference: float,
) -> np.ndarray:
  """Returns the simulated seconds of one layer, ``[plans]``.

  Args:
    attention, mlp, sums: Seconds of each nano-batch's attention block, MLP and
      all-reduces (equal for both blocks), ``[plans, nano-batches]``.
    pending: Seconds of the last reduction of the layer before, ``[plans]``.
    interference: Slowdown of device and network, see `plan`.
  """
  plans, pieces = sums.shape
  done = np.zeros((plans, 1))
  # Times of the operations that device and network run in order, [2, plans,
  # operations]. The last operation is a sentinel that never runs.
  work = np.stack([
    np.concatenate([attention, mlp, done], 1),
    np.concatenate([pending[:, None], sums, sums[:, :-1], done], 1),
  ])
  # Number of operations that the other resource must end before each may start.
  never = 2 * pieces + 1
  needs = np.array([
    [*[0] * (pieces - 1), 1, *range(2, pieces + 2), never],
    [0, *range(1, pieces + 1), *range(pieces + 1, 2 * pieces), never],
  ])
  row, rows = np.arange(2)[:, None], np.arange(plans)[None]
  at = np.zeros((2, plans), int)  # operations that have ended
  left = work[:, :, 0].copy()
  time = np.zeros(plans)
  for _ in range(4 * pieces):  # each iteration ends at least one operation
    runs = at[::-1] >= needs[row, at]
    slow = np.where(runs.all(0), 1 + interference, 1.0)
    rounds = np.where(runs, left, np.inf).min(0)
    going = np.isfinite(rounds)
    rounds = np.where(going, rounds, 0)
    time += rounds * slow
    ended = runs & (left <= rounds)
    left = np.where(runs, left - rounds, left)
    at = at + ended
    left = np.where(ended, work[row, rows, at], left)
  assert (at == 2 * pieces).all()
  return time
