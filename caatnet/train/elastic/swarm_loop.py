"""Trains as one worker of a swarm: the training loop of a `Peer`.

Each worker is a process with a folder of its own, in which are metrics,
evaluations and checkpoints as of any run. With a checkpoint is kept what the
swarm shared then, in ``swarm/STEP.npz``. A worker that comes back offers it to
its coordinator. If the swarm has gone on, the worker gets the newest revision
from the others and keeps its inner optimizer. If the whole swarm starts again,
what most workers have of the newest revision is where it goes on, and a worker
that has just that goes on from its own parameters, too.
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
import zipfile

from etils import epath
import jax
import numpy as np

from caatnet.config.schema.train import Elastic
from caatnet.data.protocol import Dataset
from caatnet.train import files, loop
from caatnet.train.elastic.multi_process import joined
from caatnet.train.elastic.single_process import Programs
from caatnet.train.elastic.worker import PREFIX, Moved, Peer
from caatnet.train.evaluate import put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.state import TrainState
from parallel.elastic.membership.shared_state import State
from parallel.elastic.patience import Finished, Halted
from parallel.elastic.settings import Settings
from parallel.elastic.swarm import Swarm
from parallel.elastic.transport.handshake import Address, Security
from parallel.memory.features import stacked

LOG = logging.getLogger(__name__)
# Of configs without the section.
_USUAL = Elastic()
_CONFIG, _PROGRAM = f"{PREFIX}config", f"{PREFIX}program"
_BYTES, _REVISION = "bytes:", "revision"  # names in a file
# Sections and keys of a config in which workers of a swarm may differ.
_OWN = ("name", "train", "inference", "elastic", "kernels")


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a worker finds its swarm.

  Attributes:
    coordinator: Where the coordinator listens.
    security: What connections are protected by.
    listen: Where the worker listens for others.
    advertise: Where these reach it; None if that is the same.
  """

  coordinator: Address
  security: Security
  listen: Address = ("127.0.0.1", 0)
  advertise: Address | None = None


def shared_by(programs: Programs, state: TrainState) -> State:
  """Returns what a worker shares: of its training state, and what it runs.

  What differs in the last bit is voted out, and compilers round otherwise where
  a worker has other devices: so all have the same ones, and the same jax.

  Args:
    programs: The worker's programs.
    state: The worker's training state.
  """
  config = programs.experiment.config
  same = {key: value for key, value in config.items() if key not in _OWN}
  digest = hashlib.sha256(json.dumps(same, sort_keys=True).encode())
  layout = programs.experiment.program.layout
  device = layout.mesh.devices.flat[0].device_kind
  program = "; ".join([*map(str, layout.axes), device, jax.__version__])
  return {
    **programs.shared(state._asdict()), _CONFIG: digest.hexdigest().encode(),
    _PROGRAM: program.encode(),
  }


def place_in(
  place: Place, programs: Programs, shared: State, revision: int = 0,
  options: Elastic = _USUAL, say: Callable[[str], None] = LOG.info,
) -> Swarm:
  """Returns a worker's place in a swarm, to be entered by `with`.

  Args:
    place: Where the swarm is.
    programs: The worker's programs.
    shared: What workers share, as the worker has it.
    revision: Its revision.
    options: How the worker takes part.
    say: Takes lines about what is waited for.
  """
  steps = programs.experiment.train.num_steps
  settings = Settings(
    alone_s=options.alone_s, lanes=options.lanes, checked=options.checksums,
    samples=programs.num_samples, rounds=programs.num_rounds(steps),
    listen=place.listen, advertise=place.advertise,
  )
  return Swarm(
    place.coordinator, place.security, shared, revision=revision,
    settings=settings, say=say,
  )


def reader(
  experiment: Experiment, dataset: Dataset
) -> Callable[[list[int]], Any]:
  """Returns a function that reads the examples of some numbers as a batch."""

  def read(numbers: list[int]) -> Any:
    examples = [dataset.examples[number] for number in numbers]
    rows = jax.tree.map(stacked, *examples)
    return put_batch(experiment.program.layout, rows)

  return read


def train(
  experiment: Experiment, workdir: str | os.PathLike[str], place: Place | None,
  options: Elastic = _USUAL,
  told: "Callable[[Run], None] | None" = None, **more: Any,
) -> loop.TrainResult:
  """Trains as a worker of a swarm; as `loop.train`, which has the other keys.

  Args:
    experiment: The run, of one worker.
    workdir: The worker's folder.
    place: Where the swarm is; None on processes of the worker but the first.
    options: How the worker takes part.
    told: Is called between two steps when there is a newer revision.
    **more: As for `loop.train`.

  Raises:
    ValueError: The outer loop cannot run so, the swarm has another config, its
      coordinator is away for too long, or as for `loop.train`.
  """
  programs = Programs(experiment)
  try:
    return loop.train(
      experiment, workdir, **more,
      make=functools.partial(Run, programs, place, options, told),
    )
  except Halted as error:
    raise ValueError(f"{error}; the same command goes on") from error
  except Finished:  # it has said so
    return loop.TrainResult(0, False, None, {}, None, [])


class Run(loop.Run):
  """A run whose steps are those of a peer.

  Attributes:
    swarm: The worker's place in the swarm.
    peer: The worker.
  """

  def __init__(
    self, programs: Programs, place: Place | None, options: Elastic,
    told: "Callable[[Run], None] | None", *args: Any,
  ) -> None:
    self._due, self._told = False, told
    self._revision = 0  # which was told of
    super().__init__(*args)
    try:
      self._join(programs, place, options)
    except BaseException:
      self.close()
      raise

  def _join(
    self, programs: Programs, place: Place | None, options: Elastic
  ) -> None:
    """Becomes a member; waits until there are enough."""

    def say(text: str) -> None:
      self.progress.say(f"swarm     {text}")

    mine = shared_by(programs, self.state)
    revision, shared = _read(self.workdir, self.first_step) or (0, mine)
    # A swarm that goes on may do so with longer training, or newer code.
    shared = {**shared, **{key: mine[key] for key in (_CONFIG, _PROGRAM)}}
    swarm = joined(
      lambda: place_in(place, programs, shared, revision, options, say)
    )
    digest = swarm.digest
    if place is not None:
      say("waits for the coordinator at {}:{}".format(*place.coordinator))
    try:
      self.swarm = self.opened.enter_context(swarm)
    except Finished as error:
      say(f"{error}; there is nothing to do")
      raise
    if swarm.state.get(_CONFIG) != mine[_CONFIG]:
      raise ValueError(
        "the workers of this swarm have another config: between workers only "
        f"config.{', config.'.join(_OWN)} may differ"
      )
    if (theirs := swarm.state.get(_PROGRAM)) != mine[_PROGRAM]:
      raise ValueError(
        f"the workers of this swarm have other devices or another jax: "
        f"{theirs and theirs.decode()}; here: {mine[_PROGRAM].decode()}. All "
        "must have the same ones, since last bits differ between programs"
      )
    self.peer = Peer(
      programs, swarm, self.state, reader(self.experiment, self.dataset),
      kept=revision > 0 and (swarm.revision, swarm.digest) == (
        revision, digest
      ),
      order=options.order,
    )
    self.opened.callback(self.peer.close)
    self.state, self.first_step = self.peer.state, self.peer.step
    say(
      f"{swarm.me}, one of {len(swarm.members)}; goes on at round "
      f"{swarm.revision}, step {self.peer.step}"
    )

  def _advance(self, step: int) -> tuple[int, Any]:
    try:
      metrics = self.peer.advance()
    except Moved:
      metrics = None
      self.progress.say(
        f"step {step}: the others went on; goes on at step {self.peer.step}"
      )
    except Halted:
      self._fall_back()
      self._save()
      raise
    self.state = self.peer.state
    if self._told is not None and self.swarm.revision > self._revision:
      self._revision = self.swarm.revision
      self._told(self)
    if self._due:
      self._save()
    return self.peer.step, metrics

  def _fall_back(self) -> None:
    """Goes back to what is committed, with this worker's optimizer."""
    with contextlib.suppress(Halted):  # it may have begun another round
      self.peer.start()
    self.state = self.peer.state

  def _land(self) -> None:
    """Waits for a round that is under way."""
    try:
      with contextlib.suppress(Moved):
        self.peer.land()
      self.state = self.peer.state
    except Halted:
      self._fall_back()

  def _save(self, last: bool = False) -> None:
    if last or self.peer.step >= self.experiment.train.num_steps:
      self._land()
    self._due = not self.peer.idle  # if so, it is saved a few steps later
    if self._due:
      return
    # First, so that whoever is killed here has no checkpoint without it.
    if jax.process_index() == 0:
      _write(self.workdir, int(self.state.step), *self.swarm.checkpoint)
    super()._save()
    if jax.process_index() == 0:
      _forget(self.workdir, self.checkpointer.steps())


def _path(workdir: epath.Path, step: int) -> epath.Path:
  return workdir / "swarm" / f"{step}.npz"


def _write(
  workdir: epath.Path, step: int, revision: int, shared: State
) -> None:
  """Keeps what a swarm shares, beside the checkpoint of a step."""
  arrays = {
    f"{_BYTES}{k}" if isinstance(v, bytes) else k:
    np.frombuffer(v, np.uint8) if isinstance(v, bytes) else v
    for k, v in shared.items()
  }
  with files.whole(_path(workdir, step)) as path, open(path, "wb") as file:
    np.savez(file, **{_REVISION: np.int64(revision)}, **arrays)


def _read(workdir: epath.Path, step: int) -> tuple[int, State] | None:
  """Reads what `_write` has kept: the revision and what was shared."""
  path = _path(workdir, step)
  if not path.exists():
    return None
  try:
    with open(path, "rb") as file, np.load(file) as found:
      arrays = dict(found)
  except (OSError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  revision = int(arrays.pop(_REVISION))
  return revision, {
    k.removeprefix(_BYTES): x.tobytes() if k.startswith(_BYTES) else x
    for k, x in arrays.items()
  }


def _forget(workdir: epath.Path, steps: list[int]) -> None:
  """Deletes what is of checkpoints that are no more."""
  for path in (workdir / "swarm").glob("*.npz"):
    if int(path.stem) < min(steps, default=0):
      path.unlink()
