"""What a run leaves behind: config, environment, metrics, TensorBoard."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from typing import Any

from etils import epath
import jax
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import directory_check

from caatnet import commands
from caatnet.config.schema import tree
from caatnet.train import files

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")

_NUM_STEPS, _DECAY_STEPS = ("train", "num_steps"), ("optimizer", "decay_steps")

# Keys that a resumed run may change: none of them is part of what is computed.
# It may change config.zero, the stages and the order of devices, too, since no
# checkpoint depends on them.
_FREE = {
  ("train", key)
  for key in ("log_every", "eval_every", "checkpoint_every",
              "keep_checkpoints")
} | {("name",), ("parallel", "stage"), ("parallel", "device_order")} | {
  ("data", key)  # how rows of features get to the devices
  for key in ("access", "ahead", "cache", "cache_rows", "sampler", "threads")
}

# Workers may join and leave (`caatnet.train.elastic.membership`), and with them
# what is said of each of them.
_WORKER = ("parallel", "worker")
_OF_WORKERS = tuple(("outer", key) for key in ("weights", "clients", "overlap"))


def write_config(workdir: epath.Path, config: dict[str, Any]) -> str:
  """Stores the run's config, or checks that the stored one is the same.

  A run may be made longer. If its learning rate decays over all of its steps,
  it goes on by the schedule of the longer run.

  Args:
    workdir: The run's folder.
    config: The run's config as plain data.

  Returns:
    What has become of the schedule, to tell users; "" if it is the same.

  Raises:
    ValueError: The folder holds a run of another config; the message names the
      key.
  """
  path = workdir / "config.json"
  notice = ""
  if path.exists():
    stored = flatten(read_config(workdir))
    ours = flatten(_completed(json.loads(json.dumps(config))))
    old, new = _decay_steps(stored), _decay_steps(ours)
    longer = ours.get(_NUM_STEPS, 0) > stored.get(_NUM_STEPS, 0)
    moved = stored.get(_WORKER) != ours.get(_WORKER)
    for key in sorted(stored.keys() | ours.keys()):
      free = (
        key in _FREE or key[0] in ("zero", "pipeline", "inference")
        or (key == _NUM_STEPS and longer)
        or (key == _DECAY_STEPS and old == new)
        or (moved and key in (_WORKER, *_OF_WORKERS))
      )
      if not free and stored.get(key) != ours.get(key):
        raise ValueError(
          f"{workdir} holds a run with config.{'.'.join(key)}="
          f"{stored.get(key)!r}, this one has {ours.get(key)!r}; "
          "use another --workdir"
        )
    if old != new:
      notice = (
        f"the learning rate now decays over {new} steps in place of {old}; "
        f"--config.optimizer.decay_steps={old} would keep the old schedule"
      )
  if jax.process_index() == 0:
    write_json(path, config)
  return notice


def _decay_steps(flat: dict[Any, Any]) -> int | None:
  """Returns over how many steps the learning rate decays."""
  return flat.get(_DECAY_STEPS) or flat.get(_NUM_STEPS)


def check_data(workdir: epath.Path, sha256: str) -> None:
  """Refuses to resume a run with other data, such as another Python's library.

  Args:
    workdir: The run's folder.
    sha256: The hash of the data that would be read now.

  Raises:
    ValueError: The folder's run read other data.
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

  A key that came later than the run has the value that does what the run did.

  Raises:
    FileNotFoundError: The folder holds no run.
    ValueError: The file is damaged; the message names it.
  """
  path = workdir / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"--workdir={workdir} holds no run (config.json)")
  config = _read_json(path)
  if not isinstance(config, dict) or not all(
    isinstance(config.get(name, {}), dict) for name in ("data", "train")
  ):
    raise ValueError(f"{path} is damaged: it is no run's config")
  if "model_type" in config:
    raise ValueError(
      f"{path} is that of a published model; launch.convert makes a run of it"
    )
  return _completed(config)


def _completed(config: dict[str, Any]) -> dict[str, Any]:
  """Returns a config with the keys that were declared after its run.

  Their defaults are what the code did before.
  """
  return json.loads(json.dumps(tree.completed(config)))


def read_environment(workdir: epath.Path) -> dict[str, Any]:
  """Reads what a run's folder says of its start; {} if nothing yet.

  Raises:
    ValueError: The file is damaged; the message names it.
  """
  path = workdir / "environment.json"
  return _read_json(path) if path.exists() else {}


def write_json(path: epath.Path, facts: Any) -> None:
  """Writes plain data as a file in place of the old one."""
  files.replace(path, json.dumps(facts, indent=2) + "\n")


def _read_json(path: epath.Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error


def flatten(config: Any, prefix: tuple[str, ...] = ()) -> dict[Any, Any]:
  """Flattens nested dicts to ``{path: value}`` with paths as tuples of keys."""
  if not isinstance(config, dict):
    return {prefix: config}
  flat: dict[Any, Any] = {}
  for key, value in config.items():
    flat |= flatten(value, (*prefix, key))
  return flat


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """Returns date, versions, devices and commit as plain data."""
  commit = ""
  # Site-packages may be inside of another repository.
  if not commands.is_installed():
    with contextlib.suppress(OSError):  # no git on this machine
      commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=commands.root(),
      ).stdout.strip()
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
    "commit": commit or "unknown",
  }


class MetricsWriter:
  """Appends to ``metrics.jsonl`` and TensorBoard; only process 0 writes.

  To a file on a cloud nothing can be appended: it is written anew by `flush`.
  """

  def __init__(self, workdir: epath.Path, first_step: int) -> None:
    """Opens the files, and drops what comes after the step that is resumed.

    A killed run may have recorded steps after its last checkpoint, or before
    its first one; they are made again.

    Args:
      workdir: The run's folder.
      first_step: The number of updates that the resumed state has.

    Raises:
      ValueError: A line is damaged; the message names it.
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
    self._board = _Board(
      os.fspath(self._path.parent / "tensorboard"), first_step
    )

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Adds one record of scalars to both."""
    if self._board is None:
      return
    line = json.dumps({"step": step, **values}) + "\n"
    if self._file is not None:
      self._file.write(line)
    else:
      self._lines.append(line)
    self._board.add(
      step, {key: x for key, x in values.items() if x is not None}
    )

  def flush(self) -> None:
    """Makes sure that all records so far outlive this process."""
    if self._board is None:
      return
    if self._file is None:
      files.replace(self._path, "".join(self._lines))
    self._board.flush()

  def close(self) -> None:
    """Flushes and closes both."""
    self.flush()
    if self._file is not None:
      self._file.close()


class _Board:
  """Writes TensorBoard's events, without a thread: its errors reach the run."""

  def __init__(self, folder: str, first_step: int) -> None:
    """Opens a new file; what others say of later steps is hidden.

    Args:
      folder: Where the files are.
      first_step: The number of updates that the resumed state has.
    """
    directory_check(folder)
    # A name for every start: those of one second would be one file.
    suffix = f".{os.getpid()}.{time.time_ns()}"
    self._events = EventsWriter(os.path.join(folder, "events"), suffix)
    log = SessionLog(status=SessionLog.START)
    self._events.write_event(Event(step=first_step + 1, session_log=log))
    self.flush()

  def add(self, step: int, values: dict[str, Any]) -> None:
    """Adds scalars; they are on the disk some seconds later."""
    now = time.time()
    for key, value in values.items():
      self._events.write_event(
        Event(wall_time=now, step=step, summary=summary.scalar(key, value))
      )
    if now > self._flushed + 30:
      self.flush()

  def flush(self) -> None:
    """Writes what was added."""
    self._flushed = time.time()
    self._events.flush()


def read_metrics(workdir: os.PathLike[str] | str) -> list[dict[str, Any]]:
  """Reads the records of a run's ``metrics.jsonl``, in order.

  Raises:
    ValueError: A line is damaged; the message names it.
  """
  path = epath.Path(workdir) / "metrics.jsonl"
  return [record for _, record in _records(path, path.read_text())]


def _records(path: epath.Path, text: str) -> list[tuple[str, dict[str, Any]]]:
  """Splits ``metrics.jsonl`` into lines and what they record.

  The last line may have no end: it is being written, or the run was killed
  while it was. Such a line is left out.
  """
  found = []
  for number, line in enumerate(text.splitlines(keepends=True), 1):
    if not line.endswith("\n"):
      break
    try:
      found.append((line, json.loads(line)))
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}:{number} is damaged: {error}") from error
  return found
