"""Measured steps over shaped links, compared with their predicted times."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import statistics
import time
from typing import Any

import numpy as np
from scipy import stats

from caatnet.benchmarks.harness import namespaces, processes, timing
from caatnet.benchmarks.harness.kept import Kept
from caatnet.show import tables
from parallel.elastic.ring.bandwidth import rounds
from parallel.hardware.devices import Device
from parallel.hardware.link_matrix import LinkMatrix
from parallel.hardware.links import LinkKind
from parallel.pipeline.pipeline_schedule import Kind
from parallel.planner import device_order, latency
from parallel.planner.latency import Timing
from parallel.planner.memory import cached_schedule
from parallel.planner.problem import Problem
from parallel.planner.space import Choices, Configuration, everything, refusal
from parallel.workload import TrainingStep, Transformer

_SOURCE = "configs/benchmark/planner_truth.py"


def run(config: Any) -> dict[str, Any]:
  """Measures missing rows, and returns all rows.

  Args:
    config: Config like configs/benchmark/planner_truth.py.

  Raises:
    ValueError: Links cannot be shaped here, the number of rates is neither 0
      nor 2, or the file has rows of another config.
  """
  options = config.benchmark
  if len(options.rates) not in (0, 2):
    raise ValueError(
      f"config.benchmark.rates={options.rates} must have a lowest and a "
      "highest one, or none"
    )
  kept = Kept(config, matrices={})
  matrices = kept.found["matrices"]
  end = time.monotonic() + options.limit_s
  for seed in options.seeds:
    matrix = matrices.get(str(seed), {})
    if matrix.get("left") == 0 or time.monotonic() > end:
      continue
    with _peers(options, seed) as peers:
      for _ in _measured(options, seed, matrix, peers):
        matrices[str(seed)] = matrix
        kept.save()
        if time.monotonic() > end:
          break
  return {"benchmark": "planner_truth"} | _shown(matrices)


@contextlib.contextmanager
def _peers(options: Any, seed: int) -> Iterator[processes.Peers]:
  """Starts processes between links of rates drawn with a seed."""
  count = options.processes
  with contextlib.ExitStack() as stack:
    hosts, prefixes = ["127.0.0.1"] * count, [[]] * count
    if options.rates:
      low, high = np.log(options.rates)
      rng = np.random.default_rng(seed)
      # Rates are log-uniform between the lowest and the highest, in bytes/s.
      hosts, prefixes = stack.enter_context(namespaces.shaped(
        np.exp(rng.uniform(low, high, (count, count)))
      ))
    peers = stack.enter_context(processes.Peers(
      "caatnet.benchmarks.planner.planner_truth_peer:Peer",
      list(enumerate(hosts)), prefixes,
    ))
    addresses = peers.do("address").found
    peers.do("connect", lambda _: {"addresses": addresses})
    yield peers


def _measured(
  options: Any, seed: int, matrix: dict[str, Any], peers: processes.Peers
) -> Iterator[None]:
  """Adds a row to a matrix for each configuration that lacks one."""
  count = options.processes
  if not matrix:
    answers = peers.do("measure", lambda _: {
      "rounds": rounds(count), "size": 1 << 16, "train": 4, "times": 5
    }).found
    bandwidth, latency_s = np.full((2, count, count), np.nan)
    for j, answer in enumerate(answers):
      for i, found in answer.items():
        latency_s[int(i), j], bandwidth[int(i), j] = found  # from i to j
    matrix |= {"bandwidth": bandwidth.tolist(), "latency_s": latency_s.tolist()}
    matrix["picked"] = [
      [dataclasses.asdict(c), kind, order.ravel().tolist(), seconds]
      for c, kind, order, seconds in picked(
        problem_of(options, bandwidth, latency_s), options, seed
      )
    ]
    matrix["rows"] = []
  chosen = problem_of(options, *(
    np.array(matrix[key], float) for key in ("bandwidth", "latency_s")
  ))
  matrix["left"] = len(matrix["picked"]) - len(matrix["rows"])
  for values, kind, order, predicted in timing.progress(
    matrix["picked"][len(matrix["rows"]) :], f"matrix {seed}"
  ):
    c = Configuration(**values)
    given = jobs(c, chosen, np.array(order).reshape(c.grid), options.quota)
    taken = []
    for _ in range(options.rounds):
      ends = peers.do("run", lambda i, given=given: {"job": given[i]}).found
      taken.append(
        # All processes use one machine's monotonic clock.
        max(e["end"] for e in ends) - min(e["start"] for e in ends)
      )
    matrix["rows"].append({
      "configuration": str(c), "order": kind, "predicted_s": predicted,
      "measured_s": statistics.median(taken), "all_s": taken,
      "sent_bytes": sum(e["sent"] for e in ends), "load": timing.load(),
    })
    matrix["left"] -= 1
    yield


def problem_of(
  options: Any, bandwidth: np.ndarray, latency_s: np.ndarray
) -> Problem:
  """Returns the benchmark's model on its device and measured links."""
  # A device that computes at a chosen rate by waiting, with unlimited memory
  # and bandwidth.
  device = Device(
    "wait", {"float32": options.flops, "bfloat16": options.flops}, 10**12, 1e18,
    LinkKind("wait", 1e18, None, _SOURCE), 1, _SOURCE,
  )
  links = LinkMatrix(
    "processes", device, tuple(range(len(bandwidth))), bandwidth, latency_s,
    "measured by this benchmark", "measured",
  )
  width = options.width
  model = Transformer(
    width, width, options.layers, 8, 8, 2 * width, dtype="float32"
  )
  step = TrainingStep(model, options.batch_size, options.positions)
  return Problem(step, links, Timing(1.0, "events"))


def picked(
  problem: Problem, options: Any, seed: int
) -> list[tuple[Configuration, str, np.ndarray, float]]:
  """Draws configurations with orders, the best of all first.

  Returns:
    (configuration, kind of order, device of each coordinate, predicted
    seconds).
  """
  rng, n = np.random.default_rng(seed), problem.links.num_devices
  step = problem.step
  choices = Choices(
    tuple(options.schedules), (1,), ("ddp",), ("psum",), ("none",), False,
    step.batch_size,
  )
  found = []
  for c in everything(step.batch_size, n, choices):
    if refusal(c, step, choices) is not None:
      continue
    orders = {
      "own": np.arange(n), "random": rng.permutation(n),
      "planner's": device_order.search(problem.traffic(c)).devices,
    }
    for kind, order in orders.items():
      order = order.reshape(c.grid)
      found.append((c, kind, order, problem.predict(c, order).total))
  found.sort(key=lambda x: x[-1])
  # Only configurations near the predicted best are worth the measurement.
  best, *others = [x for x in found if x[-1] <= options.within * found[0][-1]]
  some = rng.permutation(len(others))[: options.drawn - 1]
  return [best, *(others[i] for i in some)]


def jobs(
  c: Configuration, problem: Problem, order: np.ndarray, quota: float
) -> list[dict[str, Any]]:
  """Returns the actions of each device in a step, in the peers' format.

  An action has: the message that it waits for (device and tag, or None),
  seconds of compute, reductions over tensor ranks, and the message that it
  sends. A third of the reductions are in the forward, as in the prediction.
  """
  p, d, t = c.grid
  step, links, timing = problem.step, problem.links, problem.timing
  sent = latency.messages(c, step)
  # Seconds of a stage's forward, and of its recomputation in the backward.
  stage_s, again_s = latency.stage(c, step, links.device, timing.utilisation)
  # Without a pipeline: forward and backward of each microbatch in turn.
  if p == 1:
    kinds = [[Kind.FORWARD], [Kind.BACKWARD]] * c.microbatches
    numbers, splits = np.repeat(np.arange(c.microbatches), 2)[:, None], 0
  else:
    # [tick, stage]
    table = cached_schedule(c.schedule, p, c.microbatches, 1)[0]
    kinds, numbers, splits = table.kinds, table.microbatches, table.splits
  seconds = {
    Kind.FORWARD: stage_s, Kind.BACKWARD: 2 * stage_s + again_s,
    Kind.INPUT: stage_s + again_s, Kind.WEIGHT: stage_s + again_s * splits,
  }
  times = round(sum(times for _, times in sent.reductions)) if t > 1 else 0
  received, _ = sent.exchanges
  # A ring receives 2 (d - 1) / d of the buffer. 4 bytes are one element.
  gradients = received * d / (2 * (d - 1)) if d > 1 else 4
  given: list[dict[str, Any]] = [{}] * c.grid.size
  for s, i, k in np.ndindex(*c.grid):
    actions = []
    for kind, m in zip(kinds, numbers, strict=True):
      kind, m = Kind(kind[s]), int(m[s])
      if kind == Kind.IDLE:
        continue
      back = kind != Kind.FORWARD
      # Backwards receive from the next stage, forwards from the previous one.
      takes, makes = (s + 1, s - 1) if back else (s - 1, s + 1)
      alone = kind == Kind.WEIGHT  # weight gradients: local
      ends = [
        None if alone or not 0 <= x < p else int(order[x, i, k])
        for x in (takes, makes)
      ]
      reductions = 0 if alone else times - times // 3 if back else times // 3
      actions.append([
        ends[0], m, seconds[kind], reductions, ends[1], m
      ])
    given[int(order[s, i, k])] = {
      "actions": actions, "quota": quota, "boundary": int(sent.boundary),
      "reduction": int(sent.reductions[0][0]), "gradients": int(gradients),
      "tensor": order[s, i].tolist(), "data": order[s, :, k].tolist(),
      "head_s": float(
        latency.vocabulary(c, step, links, timing, order)
      ),
    }
  return given


def _shown(matrices: Mapping[str, Any]) -> dict[str, Any]:
  """Prints rows and their summary, and returns both."""
  rows = [
    {"seed": seed, **row} for seed, matrix in matrices.items()
    for row in matrix["rows"]
  ]
  tables.table(
    "a step predicted, and measured between processes (median)",
    ["matrix", "configuration", "order", "predicted, s", "measured, s",
     "measured / predicted"],
    [
      [row["seed"], row["configuration"], row["order"],
       f"{row['predicted_s']:.3f}", f"{row['measured_s']:.3f}",
       f"{row['measured_s'] / row['predicted_s']:.3f}"]
      for row in rows
    ],
  )
  predicted, measured = (
    np.array([row[key] for row in rows]) for key in ("predicted_s",
                                                     "measured_s")
  )
  correlation = float(stats.spearmanr(predicted, measured).statistic)
  loss = {
    seed: matrix["rows"][0]["measured_s"]
    / min(row["measured_s"] for row in matrix["rows"]) - 1
    for seed, matrix in matrices.items()
  }
  errors = np.abs(measured / predicted - 1)
  print(
    f"rank correlation over {len(rows)}: {correlation:.3f}; error: median "
    f"{np.median(errors):.1%}, most {errors.max():.1%}; the predicted best "
    "takes longer than the measured best by "
    + ", ".join(f"{x:.1%}" for x in loss.values())
  )
  return {
    "rows": rows, "rank_correlation": correlation, "loss": loss,
    "left": sum(matrix["left"] for matrix in matrices.values()),
  }
