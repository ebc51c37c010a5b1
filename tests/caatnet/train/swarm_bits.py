"""Bits of workers in a swarm, compared with the same workers on a mesh axis."""

from concurrent.futures import ThreadPoolExecutor
import dataclasses
import pathlib
import tempfile
import threading
from typing import Any

import jax
import numpy as np

from caatnet.train.elastic.single_process import Programs
from caatnet.train.elastic.swarm_loop import (
  Endpoint,
  build_shared_state,
  make_batch_reader,
  make_swarm,
)
from caatnet.train.elastic.worker import SwarmWorker
from caatnet.train.experiment import Experiment
from parallel.outer.base import PER_WORKER_KEYS, WORKER_DIM_KEYS
from parallel.peers.membership import history, journal, service
from parallel.peers.membership.coordinator import Rules
from parallel.peers.transport import handshake

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
    sum(int(np.sum(bits(x) != bits(y))) for x, y in pairs),
    max(
      float(np.max(np.abs(x - y), initial=0))
      / max(float(np.max(np.abs(y), initial=0)), 1e-30)
      for x, y in pairs if np.issubdtype(x.dtype, np.floating)
    ),
  )


def bits(x: np.ndarray) -> np.ndarray:
  """Returns unsigned integers: NaNs and signed zeros are compared by bits."""
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
  read = make_batch_reader(experiment, experiment.data.load(experiment.seed))
  with tempfile.TemporaryDirectory() as folder, journal.Journal(
    f"{folder}/journal"
  ) as kept:
    coordinator = service.CoordinatorService(
      ("127.0.0.1", 0), _SECURITY, kept, rules=Rules(workers),
      log=history.Log(pathlib.Path(folder) / "log"), say=lambda _: None,
    )
    threading.Thread(target=coordinator.serve, daemon=True).start()

    def train(_: int) -> tuple[int, Any]:
      state = experiment.init_state()
      with make_swarm(
        Endpoint(coordinator.address, _SECURITY), programs,
        build_shared_state(programs, state),
      ) as swarm:
        rank = swarm.members.index(swarm.me)
        peer = SwarmWorker(programs, swarm, state, read)
        for _ in range(steps):
          peer.advance()
        peer.finish_round()
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
  return _kept(states)


def _kept(states: list[Any]) -> Any:
  """Returns the compared arrays of workers with separate states."""
  stacked = jax.tree.map(
    lambda *x: np.concatenate([np.asarray(part) for part in x]),
    *[(s.params, s.opt_state, s.outer.get("workers", {})) for s in states],
  )
  own = {*WORKER_DIM_KEYS, *PER_WORKER_KEYS}  # private outer state
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
  read = make_batch_reader(experiment, experiment.data.load(experiment.seed))
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
  return _kept([state])
