"""Records of a run: config, environment, metrics and TensorBoard events."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import time
from typing import Any

from etils import epath
import jax
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import directory_check

from caatnet import commands
from caatnet.schema import tree
from parallel.base import files
from parallel.plans.axis_kinds import AXES

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")

_NUM_STEPS_KEY, _DECAY_STEPS_KEY = ("train", "num_steps"), (
  "optimizer", "decay_steps"
)

# Keys that a resumed run may change, since they do not affect its results. It
# may also change config.zero, config.memory, the ranks of resizable axes, the
# device order and XLA's options, since checkpoints do not depend on them.
_MUTABLE_KEYS = {
  ("train", key)
  for key in ("log_every", "eval_every", "checkpoint_every",
              "keep_checkpoints")
} | {("name",)} | {
  ("parallel", key) for key in (
    "device_order", "xla_options", *(x.name for x in AXES if x.resizable)
  )
} | {
  ("federated", key)  # limits, and more rounds
  for key in ("rounds", "reconnect_s", "silence_s", "alone_s", "hang_s",
              "max_examples")
} | {
  ("data", key)  # transfer of feature rows to the devices
  for key in ("access", "ahead", "cache", "cache_rows", "sampler", "threads")
}

# A resumed run may have another number of workers
# (`caatnet.train.elastic.membership`); then these keys may change, too.
(_WORKER_KEY,) = (
  ("parallel", x.name) for x in AXES if x.parameters == "own"
)
_PER_WORKER_KEYS = tuple(
  ("outer", key) for key in ("weights", "clients", "overlap")
)


def write_config(workdir: epath.Path, config: dict[str, Any]) -> str:
  """Stores the run's config, or checks it against the stored one.

  A resumed run may have more steps. If its learning rate decays over all steps,
  it continues with the schedule of the longer run.

  Args:
    workdir: The run's folder.
    config: The run's config as plain data.

  Returns:
    A notice to users if the learning-rate schedule has changed, else "".

  Raises:
    ValueError: If the folder holds a run of another config; the message names
      the key.
  """
  path = workdir / "config.json"
  notice = ""
  if path.exists():
    stored = flatten(read_config(workdir))
    ours = flatten(_upgrade_config(json.loads(json.dumps(config))))
    old, new = _decay_steps(stored), _decay_steps(ours)
    longer = ours.get(_NUM_STEPS_KEY, 0) > stored.get(_NUM_STEPS_KEY, 0)
    moved = stored.get(_WORKER_KEY) != ours.get(_WORKER_KEY)
    for key in sorted(stored.keys() | ours.keys()):
      free = (
        key in _MUTABLE_KEYS or key[0] in (
          "zero", "memory", "pipeline", "inference"
        )
        or (key == _NUM_STEPS_KEY and longer)
        or (key == _DECAY_STEPS_KEY and old == new)
        or (moved and key in (_WORKER_KEY, *_PER_WORKER_KEYS))
      )
      if not free and stored.get(key) != ours.get(key):
        raise ValueError(
          f"{workdir} holds a run with "
          f"config.{'.'.join(key)}={stored.get(key)!r}, but this run has "
          f"{ours.get(key)!r}; use another --workdir"
        )
    if old != new:
      notice = (
        f"the learning rate now decays over {new} steps instead of {old}; "
        f"--config.optimizer.decay_steps={old} would keep the old schedule"
      )
  if jax.process_index() == 0:
    write_json(path, config)
  return notice


def _decay_steps(flat: dict[Any, Any]) -> int | None:
  """Returns the number of steps over which the learning rate decays."""
  return flat.get(_DECAY_STEPS_KEY) or flat.get(_NUM_STEPS_KEY)


def check_data(workdir: epath.Path, sha256: str) -> None:
  """Checks that a resumed run reads the same data.

  The default corpus, for example, depends on the Python version, since it is
  the standard library's source.

  Args:
    workdir: The run's folder.
    sha256: The hash of the data that would be read now.

  Raises:
    ValueError: If the folder's run read other data.
  """
  stored = read_environment(workdir).get("data")
  if stored is not None and stored["sha256"] != sha256:
    raise ValueError(
      f"{workdir} was trained on other data ({stored['name']}, sha256 "
      f"{stored['sha256'][:16]}, now {sha256[:16]}); see config.data.path, "
      "or use another --workdir"
    )


def read_config(workdir: epath.Path) -> dict[str, Any]:
  """Reads the config of a run's folder as plain data.

  In the config of an older run, renamed keys get their current names, and keys
  that were introduced later get the values that reproduce the run.

  Raises:
    FileNotFoundError: If the folder holds no run.
    ValueError: If the file is damaged; the message names it.
  """
  path = workdir / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"--workdir={workdir} holds no run (config.json)")
  config = files.read_json(path)
  if not all(
    isinstance(config.get(name, {}), dict) for name in ("data", "train")
  ):
    raise ValueError(f"{path} is damaged: it is not the config of a run")
  if "model_type" in config:
    raise ValueError(
      f"{path} is the config of a published model; convert it to a run with "
      "launch.convert"
    )
  return _upgrade_config(config)


def _upgrade_config(config: dict[str, Any]) -> dict[str, Any]:
  """Returns a stored config with the present keys, as plain JSON data."""
  return json.loads(json.dumps(tree.upgrade_config(config)))


def read_environment(workdir: epath.Path) -> dict[str, Any]:
  """Reads a run's ``environment.json``; {} if there is none yet.

  Raises:
    ValueError: If the file is damaged; the message names it.
  """
  path = workdir / "environment.json"
  return files.read_json(path) if path.exists() else {}


def write_json(path: epath.Path, facts: Any) -> None:
  """Writes data to a JSON file, atomically replaced; NaN becomes null."""
  files.replace(path, files.to_json(facts, indent=2) + "\n")


def flatten(config: Any, prefix: tuple[str, ...] = ()) -> dict[Any, Any]:
  """Flattens nested dicts to ``{path: value}`` with paths as tuples of keys.

  Example:
    >>> flatten({"name": "a", "train": {"num_steps": 8}})
    {('name',): 'a', ('train', 'num_steps'): 8}
  """
  if not isinstance(config, dict):
    return {prefix: config}
  flat: dict[Any, Any] = {}
  for key, value in config.items():
    flat |= flatten(value, (*prefix, key))
  return flat


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """Returns a run's date, versions, devices and commit, as plain data."""
  device = mesh.devices.flat[0]
  now = datetime.datetime.now(datetime.UTC)
  return {
    "date": now.isoformat(timespec="seconds"),
    "python": platform.python_version(),
    "machine": platform.machine(),
    "versions": {p: importlib.metadata.version(p) for p in _PACKAGES},
    "devices": f"{mesh.devices.size} x {device.device_kind}",
    "processes": jax.process_count(),
    "mesh": dict(mesh.shape),
    "commit": commands.current_commit(),
  }


class MetricsWriter:
  """Writer of ``metrics.jsonl`` and TensorBoard events; only process 0 writes.

  Files in cloud storage cannot be appended to, so `flush` rewrites them.
  """

  def __init__(self, workdir: epath.Path, first_step: int) -> None:
    """Opens the files, and drops records of steps that will be repeated.

    A killed run may have recorded steps after its last checkpoint, which the
    resumed run repeats; without any checkpoint, it repeats all steps.

    Args:
      workdir: The run's folder.
      first_step: The number of updates of the resumed state.

    Raises:
      ValueError: If a line is damaged; the message names it.
    """
    self._file = self._board = None
    if jax.process_index():
      return
    self._path = workdir / "metrics.jsonl"
    text = self._path.read_text() if self._path.exists() else ""
    self._lines = [
      line for line, record in _records(self._path, text)
      if first_step and record["step"] <= first_step
    ]
    kept = "".join(self._lines)
    if kept != text:
      files.replace(self._path, kept)
    if not files.is_cloud(self._path):
      self._file = open(self._path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    self._board = _TensorBoardWriter(
      os.fspath(self._path.parent / "tensorboard"), first_step
    )

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Adds one record of scalars; None in ``values`` is not plotted."""
    if self._board is None:
      return
    line = files.to_json({"step": step, **values}) + "\n"
    if self._file is not None:
      with files.name_file_in_errors(self._path):
        self._file.write(line)
    else:
      self._lines.append(line)
    self._board.add(
      step, {key: x for key, x in values.items() if x is not None}
    )

  def flush(self) -> None:
    """Writes all records so far to storage."""
    if self._board is None:
      return
    if self._file is None:
      files.replace(self._path, "".join(self._lines))
    self._board.flush()

  def close(self) -> None:
    """Flushes and closes both files."""
    with contextlib.ExitStack() as opened:
      if self._board is not None:
        opened.callback(self._board.close)
      if self._file is not None:
        opened.enter_context(files.name_file_in_errors(self._path))
        opened.callback(self._file.close)
      self.flush()


class _TensorBoardWriter:
  """Writer of TensorBoard events that raises errors in the caller's thread."""

  def __init__(self, folder: str, first_step: int) -> None:
    """Opens a new file; TensorBoard then ignores repeated steps in older files.

    Args:
      folder: The folder of all event files of the run.
      first_step: The number of updates of the resumed state.
    """
    self._folder = folder
    directory_check(folder)
    # A unique suffix: the writer's names have a resolution of one second.
    suffix = f".{os.getpid()}.{time.time_ns()}"
    self._events = EventsWriter(os.path.join(folder, "events"), suffix)
    log = SessionLog(status=SessionLog.START)
    self._events.write_event(Event(step=first_step + 1, session_log=log))
    self.flush()

  def add(self, step: int, values: dict[str, Any]) -> None:
    """Adds scalars; flushes if the last flush was more than 30 s ago."""
    now = time.time()
    for key, value in values.items():
      self._events.write_event(
        Event(wall_time=now, step=step, summary=summary.scalar(key, value))
      )
    if now > self._flushed + 30:
      self.flush()

  def flush(self) -> None:
    """Writes all added events."""
    self._flushed = time.time()
    with files.name_file_in_errors(self._folder):
      self._events.flush()

  def close(self) -> None:
    """Writes all added events and closes the file."""
    with files.name_file_in_errors(self._folder):
      self._events.close()


def read_metrics(workdir: os.PathLike[str] | str) -> list[dict[str, Any]]:
  """Reads the records of a run's ``metrics.jsonl``, in order.

  Raises:
    ValueError: If a line is damaged; the message names it.
  """
  path = epath.Path(workdir) / "metrics.jsonl"
  return [record for _, record in _records(path, path.read_text())]


def _records(path: epath.Path, text: str) -> list[tuple[str, dict[str, Any]]]:
  """Parses ``metrics.jsonl``; returns (line, record) for each line.

  A last line without newline is left out: it is being written, or the run was
  killed while writing it.

  Raises:
    ValueError: If a line is not JSON, or not the record of a step.
  """
  found = []
  for number, line in enumerate(text.splitlines(keepends=True), 1):
    if not line.endswith("\n"):
      break
    try:
      record = json.loads(line)
      if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError("a record must have a step")
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}:{number} is damaged: {error}") from error
    found.append((line, record))
  return found
