"""Bitwise comparison of workers in a swarm with the same on a mesh axis."""

from concurrent.futures import ThreadPoolExecutor
import dataclasses
import os
import pathlib
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np

from caatnet.benchmarks.harness import setup
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.show import tables
from caatnet.train.elastic.single_process import Programs
from caatnet.train.elastic.swarm_loop import (
  Endpoint,
  make_swarm,
  reader,
  shared_by,
)
from caatnet.train.elastic.worker import Peer
from caatnet.train.experiment import Experiment
from parallel.elastic.membership import history, journal, service
from parallel.elastic.membership.coordinator import Rules
from parallel.elastic.transport import handshake

_SECURITY = handshake.Security(b"all threads of this process")


@dataclasses.dataclass(frozen=True)
class Difference:
  """Differences between two runs of the same workers.

  Attributes:
    elements: Number of elements compared: the workers' parameters and the outer
      loop's state, at the end.
    unequal: Number of elements whose bits differ.
    largest: Largest difference, relative to the largest magnitude of its array.
  """

  elements: int
  unequal: int
  largest: float


def run(config: Any) -> dict[str, Any]:
  """Compares all cases, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/elastic/bits.py.
  """
  rows = []
  for name, changes in config.benchmark.cases:
    # One worker's programs, compiled once and shared by all threads.
    programs = Programs(_built(config, changes, 1))
    for workers in config.benchmark.workers:
      began = time.perf_counter()
      found = compare(
        programs, _built(config, changes, workers), config.benchmark.steps
      )
      print(f"{name}, {workers} workers: {found}", flush=True)
      rows.append({
        "case": name, "workers": workers, **dataclasses.asdict(found),
        "seconds": time.perf_counter() - began,
      })
  _show(rows, config.benchmark.steps)
  return {"benchmark": "elastic_bits", "rows": rows}


def _show(rows: list[dict[str, Any]], steps: int) -> None:
  tables.table(
    f"workers in a swarm and on a mesh axis, {steps} steps, "
    f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')}",
    ["case", "workers", "numbers", "of other bits", "largest difference",
     "seconds"],
    [
      [r["case"], str(r["workers"]), f"{r['elements']:,}", f"{r['unequal']:,}",
       f"{r['largest']:.1e}", f"{r['seconds']:.0f}"]
      for r in rows
    ],
  )


def _built(config: Any, changes: str, workers: int) -> Experiment:
  """Builds a case for a number of workers, each with the same batch."""
  run_config = setup.without_benchmark(config)
  if workers > 1:  # on a mesh, as it runs without a swarm
    with run_config.unlocked():
      del run_config["elastic"]
  built = override(
    run_config,
    f"{changes} parallel.worker={workers} "
    f"data.batch_size={workers * config.data.batch_size}",
  )
  return experiments.build(built, {"worker": workers})


def compare(
  programs: Programs, experiment: Experiment, steps: int
) -> Difference:
  """Trains in a swarm and on a mesh, and compares all bits.

  Args:
    programs: Programs of one worker.
    experiment: Experiment of all workers, on a mesh.
    steps: Number of steps.
  """
  workers = experiment.program.layout.worker.size
  own, shared = in_swarm(programs, workers, steps)
  mesh = on_mesh(experiment, programs, steps)
  # A mesh lacks the part of the state that only initialises joining workers.
  apart = own, {key: shared[key] for key in mesh[1]}
  pairs = [
    (np.asarray(x), np.asarray(y))
    for x, y in zip(
      jax.tree.leaves(apart), jax.tree.leaves(mesh), strict=True
    )
  ]
  return Difference(
    sum(x.size for x, _ in pairs),
    sum(int(np.sum(_bits(x) != _bits(y))) for x, y in pairs),
    max(
      float(np.max(np.abs(x - y), initial=0))
      / max(float(np.max(np.abs(y), initial=0)), 1e-30)
      for x, y in pairs if np.issubdtype(x.dtype, np.floating)
    ),
  )


def _bits(x: np.ndarray) -> np.ndarray:
  # Unsigned integers, so that NaNs and signed zeros are compared by bits.
  return x.view(f"u{x.dtype.itemsize}")


def in_swarm(programs: Programs, workers: int, steps: int) -> Any:
  """Trains in a swarm of threads of this process.

  Args:
    programs: Programs of one worker.
    workers: Number of workers.
    steps: Number of steps of each.

  Returns:
    Parameters and private state of the workers, ``[workers, ...]``; and their
    shared state.
  """
  experiment = programs.experiment
  read = reader(experiment, experiment.data.load(experiment.seed))
  with tempfile.TemporaryDirectory() as folder, journal.Journal(
    f"{folder}/journal"
  ) as kept:
    coordinator = service.Service(
      ("127.0.0.1", 0), _SECURITY, kept, rules=Rules(workers),
      log=history.Log(pathlib.Path(folder) / "log"), say=lambda _: None,
    )
    threading.Thread(target=coordinator.serve, daemon=True).start()

    def train(_: int) -> tuple[int, Any]:
      state = experiment.init_state()
      with make_swarm(
        Endpoint(coordinator.address, _SECURITY), programs,
        shared_by(programs, state),
      ) as swarm:
        rank = swarm.members.index(swarm.me)
        peer = Peer(programs, swarm, state, read)
        for _ in range(steps):
          peer.advance()
        peer.land()
        peer.close()
        return rank, peer.state

    try:
      with ThreadPoolExecutor(workers) as threads:
        states = [s for _, s in sorted(
          # Sorted by rank, the worker's index on the mesh axis.
          threads.map(train, range(workers)), key=lambda found: found[0]
        )]
    finally:
      coordinator.close()
  return _kept(experiment, states)


def _kept(experiment: Experiment, states: list[Any]) -> Any:
  """Returns the compared arrays of workers with separate states."""
  outer = experiment.outer
  stacked = jax.tree.map(
    lambda *x: np.concatenate([np.asarray(part) for part in x]),
    *[(s.params, s.opt_state, s.outer.get("workers", {})) for s in states],
  )
  own = {*outer.own, *outer.of_each}  # private outer state
  common = {k: v for k, v in states[0].outer.items() if k not in own}
  return stacked, jax.tree.map(np.asarray, common)


def on_mesh(
  experiment: Experiment, rounds: Programs, steps: int
) -> Any:
  """Trains on a mesh with the samples that a swarm's workers would lease.

  Args:
    experiment: Experiment of all workers.
    rounds: Programs that assign samples to workers and steps.
    steps: Number of steps.

  Returns:
    The same as `in_swarm`.
  """
  workers = experiment.program.layout.worker.size
  batch_size = rounds.experiment.data.batch_size
  read = reader(experiment, experiment.data.load(experiment.seed))
  state, compiled = experiment.init_state(), {}
  first, number = 0, 0  # first sample of the round, number of the round
  for step in range(steps):
    while step == rounds.event(number).until:  # the round ends here
      first += workers * rounds.num_samples(number)
      number += 1
    begin = first + (step - rounds.start(number)) * batch_size
    batch = read([
      begin + worker * rounds.num_samples(number) + i
      for worker in range(workers) for i in range(batch_size)
    ])
    plan = experiment.outer.plan(step)
    if plan.variant not in compiled:
      compiled[plan.variant] = experiment.lower_step(plan).compile(
        rounds.options
      )
    numbers = jax.tree.map(np.int32, plan.numbers)
    state, _ = compiled[plan.variant](state, batch, numbers)
  return _kept(experiment, [state])
