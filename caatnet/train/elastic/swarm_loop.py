"""Training loop of one worker in a swarm, around a `SwarmWorker`.

Each worker has a separate folder with metrics, evaluations and checkpoints, as
any run. Next to a checkpoint, ``swarm/STEP.npz`` stores the state that the
swarm shared at that step. A worker that rejoins offers this state to the
coordinator. If the swarm has continued meanwhile, the worker receives the
newest revision from other workers and keeps its inner optimizer. If the whole
swarm restarts, it resumes from the newest revision that most workers have; a
worker with exactly this revision also resumes from its own parameters.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from typing import Any

from etils import epath
import jax
import numpy as np

from caatnet.data.protocol import Dataset
from caatnet.schema.train import Elastic
from caatnet.train import loop
from caatnet.train.elastic.multi_process import replicate_swarm
from caatnet.train.elastic.single_process import Programs
from caatnet.train.elastic.worker import ELASTIC_PREFIX, StepJump, SwarmWorker
from caatnet.train.evaluate import put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState
from parallel.base import files
from parallel.base.arrays import read_npz
from parallel.memory.features import stacked
from parallel.peers.membership.shared_state import State
from parallel.peers.settings import PeerSettings
from parallel.peers.swarm import Swarm
from parallel.peers.timeouts import (
  PeerHalted,
  RunFinished,
  StoppedByCoordinator,
)
from parallel.peers.transport.handshake import Address, Security

LOG = logging.getLogger(__name__)
# Options for configs without a section config.elastic.
_DEFAULT_OPTIONS = Elastic()
_CONFIG_KEY, _PROGRAM_KEY = (
  f"{ELASTIC_PREFIX}config",
  f"{ELASTIC_PREFIX}program",
)
_BYTES_PREFIX, _REVISION_KEY = "bytes:", "revision"  # names in an .npz file
# Sections and keys of a config in which workers of a swarm may differ.
_LOCAL_KEYS = ("name", "train", "inference", "elastic", "kernels")


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """Network addresses and security of a worker.

  Attributes:
    coordinator: Address of the coordinator.
    security: Keys or certificates that authenticate connections.
    listen: Address on which the worker accepts connections of peers.
    advertise: Address under which peers reach the worker; None for ``listen``.
  """

  coordinator: Address
  security: Security
  listen: Address = ("127.0.0.1", 0)
  advertise: Address | None = None


def build_shared_state(programs: Programs, state: TrainState) -> State:
  """Returns the shared part of a training state, with a hash of the config.

  Workers vote on each result, and a result that differs from the majority's in
  the last bit is dropped. Other devices or compilers may round the last bit
  differently, so all workers must have equal configs, axes, devices and jax.

  Args:
    programs: The worker's programs.
    state: The worker's training state.

  Returns:
    Arrays by name, and bytes under names with the prefix "elastic/": a hash of
    the config, and a description of the program.
  """
  config = programs.experiment.config
  same = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
  digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode())
  layout = programs.experiment.program.layout
  device = layout.mesh.devices.flat[0].device_kind
  program = "; ".join([*map(str, layout.axes), device, jax.__version__])
  return {
    **programs.shared(state._asdict()),
    _CONFIG_KEY: digest.hexdigest().encode(), _PROGRAM_KEY: program.encode(),
  }


def make_swarm(
  endpoint: Endpoint, programs: Programs, shared: State, revision: int = 0,
  options: Elastic = _DEFAULT_OPTIONS, say: Callable[[str], None] = LOG.info,
) -> Swarm:
  """Returns a worker's membership in a swarm; entering it by `with` joins.

  Args:
    endpoint: Addresses and security.
    programs: The worker's programs.
    shared: The worker's copy of the shared state.
    revision: The revision of ``shared``.
    options: Options of the worker's membership.
    say: Receives lines about what the worker is waiting for.

  Raises:
    ValueError: ``options.measured`` is set, but sums do not use a ring.
  """
  if options.measured and options.order != "ring":
    raise ValueError(
      "config.elastic.measured=True has no effect with config.elastic.order="
      f"{options.order!r}; set order to 'ring'"
    )
  steps = programs.experiment.train.num_steps
  settings = PeerSettings(
    alone_s=options.alone_s, num_connections=options.num_connections,
    checked=options.checksums, measured=options.measured,
    samples=programs.num_samples,
    rounds=programs.num_rounds(steps), listen=endpoint.listen,
    advertise=endpoint.advertise,
  )
  return Swarm(
    endpoint.coordinator, endpoint.security, shared, revision=revision,
    settings=settings, say=say,
  )


def make_batch_reader(
  experiment: Experiment, dataset: Dataset
) -> Callable[[list[int]], Any]:
  """Returns a function that reads examples by index as a batch on devices."""

  def read(numbers: list[int]) -> Any:
    examples = [dataset.examples[number] for number in numbers]
    rows = jax.tree.map(stacked, *examples)
    return put_batch(experiment.program.layout, rows)

  return read


def train(
  experiment: Experiment, workdir: str | os.PathLike[str],
  endpoint: Endpoint | None, options: Elastic = _DEFAULT_OPTIONS,
  on_commit: "Callable[[SwarmRun], None] | None" = None, **more: Any,
) -> loop.TrainResult:
  """Trains as a worker of a swarm; see `loop.train`.

  Args:
    experiment: The run, with one worker.
    workdir: The worker's folder.
    endpoint: Addresses and security; None on all processes of the worker except
      process 0.
    options: Options of the worker's membership.
    on_commit: Called between two steps after a new revision has been committed.
    **more: Further arguments of `loop.train`.

  Returns:
    The result of the run; with step 0 if the swarm has already finished.

  Raises:
    ValueError: If the outer loop does not support elastic membership, the swarm
      has another config, or its coordinator is unreachable for too long; and
      for the reasons of `loop.train`.
  """
  programs = Programs(experiment)
  try:
    return loop.train(
      experiment, workdir, **more,
      make=functools.partial(SwarmRun, programs, endpoint, options, on_commit),
    )
  except StoppedByCoordinator as error:
    raise ValueError(str(error)) from error
  except PeerHalted as error:
    raise ValueError(f"{error}; the same command resumes") from error
  except RunFinished:  # already reported in `_join`
    return loop.TrainResult(0, False, None, {}, None, [])


class SwarmRun(loop.Run):
  """Run whose steps are executed by a `SwarmWorker`.

  Attributes:
    swarm: The worker's membership in the swarm.
    peer: The worker, which executes the steps.
  """

  def __init__(
    self, programs: Programs, endpoint: Endpoint | None, options: Elastic,
    on_commit: "Callable[[SwarmRun], None] | None", *args: Any,
  ) -> None:
    self._due, self._on_commit = False, on_commit
    self._revision = 0  # the last one that was reported to `on_commit`
    super().__init__(*args)
    try:
      self._join(programs, endpoint, options)
    except BaseException:
      self.close()
      raise

  def _join(
    self, programs: Programs, endpoint: Endpoint | None, options: Elastic
  ) -> None:
    """Joins the swarm; waits until it has enough members."""

    def say(text: str) -> None:
      self.progress.say(f"swarm     {text}")

    mine = build_shared_state(programs, self.state)
    found = _read_shared_state(self.workdir, self.first_step)
    if found is None and self.first_step:
      raise ValueError(
        f"--workdir={self.workdir} has a run of {self.first_step} steps that "
        "were not made in a swarm, which cannot continue it: use another "
        f"--workdir, and --config.train.init_from={self.workdir} to start from "
        "its parameters"
      )
    revision, shared = found or (0, mine)
    # A resumed swarm may have more steps or newer code, so config and program
    # are taken from this process.
    shared = {
      **shared, **{key: mine[key] for key in (_CONFIG_KEY, _PROGRAM_KEY)}
    }
    swarm = replicate_swarm(
      lambda: make_swarm(endpoint, programs, shared, revision, options, say)
    )
    digest = swarm.digest
    if endpoint is not None:
      say("waits for the coordinator at {}:{}".format(*endpoint.coordinator))
    try:
      self.swarm = self.opened.enter_context(swarm)
    except RunFinished as error:
      say(f"{error}; no steps are left")
      raise
    except StoppedByCoordinator as error:
      raise ValueError(
        f"--workdir={self.workdir}, step {self.first_step}: {error}"
      ) from error
    if swarm.state.get(_CONFIG_KEY) != mine[_CONFIG_KEY]:
      raise ValueError(
        "the workers of this swarm have another config; only "
        f"config.{', config.'.join(_LOCAL_KEYS)} may differ between workers"
      )
    if (theirs := swarm.state.get(_PROGRAM_KEY)) != mine[_PROGRAM_KEY]:
      raise ValueError(
        f"the workers of this swarm have other devices or another jax: "
        f"{theirs and theirs.decode()}; here: {mine[_PROGRAM_KEY].decode()}. "
        "All "
        "must have the same ones, since last bits differ between programs"
      )
    kept = (swarm.revision, swarm.digest) == (revision, digest)
    if revision == swarm.revision and not kept and revision:
      say(f"has another state at round {revision}, which replaces this state")
    self.peer = SwarmWorker(
      programs, swarm, self.state,
      make_batch_reader(self.experiment, self.dataset),
      kept=revision > 0 and kept,
      order=options.order,
    )
    self.opened.callback(self.peer.close)
    self.state, self.first_step = self.peer.state, self.peer.step
    say(
      f"{swarm.me}, one of {len(swarm.members)}; continues at round "
      f"{swarm.revision}, step {self.peer.step}"
    )

  def _advance(self, step: int) -> tuple[int, Any]:
    try:
      metrics = self.peer.advance()
    except StepJump:
      metrics = None
      self.progress.say(
        f"step {step}: the swarm has continued; resumes at step "
        f"{self.peer.step}"
      )
    except PeerHalted:
      self._fall_back()
      self._save()
      raise
    self.state = self.peer.state
    if self._on_commit is not None and self.swarm.revision > self._revision:
      self._revision = self.swarm.revision
      self._on_commit(self)
    if self._due:
      self._save()
    return self.peer.step, metrics

  def _fall_back(self) -> None:
    """Returns to the last committed revision, but keeps the inner optimizer."""
    with contextlib.suppress(PeerHalted):  # `start` may begin another round
      self.peer.start()
    self.state = self.peer.state

  def _finish_round(self) -> None:
    """Waits for the round in progress, if there is one."""
    try:
      with contextlib.suppress(StepJump):
        self.peer.finish_round()
      self.state = self.peer.state
    except PeerHalted:
      self._fall_back()

  def _save(self, last: bool = False) -> None:
    if last or self.peer.step >= self.experiment.train.num_steps:
      self._finish_round()
    # During a round the state is incomplete: it is saved a few steps later.
    self._due = not self.peer.idle
    if self._due:
      return
    # Written before the checkpoint: if the process is killed in between, there
    # is no checkpoint without its shared state.
    if jax.process_index() == 0:
      _write_shared_state(
        self.workdir, int(self.state.step), *self.swarm.checkpoint
      )
    super()._save()
    if jax.process_index() == 0:
      _delete_old_states(self.workdir, self.checkpointer.steps())


def _shared_state_path(workdir: epath.Path, step: int) -> epath.Path:
  return workdir / "swarm" / f"{step}.npz"


def _write_shared_state(
  workdir: epath.Path, step: int, revision: int, shared: State
) -> None:
  """Stores the swarm's shared state for the checkpoint of a step."""
  arrays = {
    f"{_BYTES_PREFIX}{k}" if isinstance(v, bytes) else k:
    np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v
    for k, v in shared.items()
  }
  with files.atomic_file(
    _shared_state_path(workdir, step)
  ) as path, open(path, "wb") as file:
    # The format has a CRC-32 of each array, but does not detect a missing one.
    np.savez(
      file, **{_REVISION_KEY: np.array([revision, len(arrays)])}, **arrays
    )


def _read_shared_state(
  workdir: epath.Path, step: int
) -> tuple[int, State] | None:
  """Returns the (revision, shared state) stored at a step; None without it."""
  path = _shared_state_path(workdir, step)
  if not path.exists():
    return None
  try:
    arrays = read_npz(path)
    revision, *num = np.atleast_1d(arrays.pop(_REVISION_KEY)).tolist()
    if num not in ([], [len(arrays)]):  # older files have no number
      raise ValueError(f"it has {len(arrays)} arrays, expected {num[0]}")
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  return revision, {
    k.removeprefix(_BYTES_PREFIX): x.tobytes() if k.startswith(
      _BYTES_PREFIX
    ) else x
    for k, x in arrays.items()
  }


def _delete_old_states(workdir: epath.Path, steps: list[int]) -> None:
  """Deletes shared states whose checkpoints have been deleted."""
  for path in (workdir / "swarm").glob("*.npz"):
    if int(path.stem) < min(steps, default=0):
      path.unlink()
