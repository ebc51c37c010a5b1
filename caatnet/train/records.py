"""What a run leaves behind: config, environment, metrics, TensorBoard."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess
from typing import Any

import jax
from tensorboardX import SummaryWriter

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")

# Keys that a resumed run may change: none of them is part of what is computed.
# It may change config.zero, too, since no checkpoint depends on the partition.
_FREE = {
  ("train", key)
  for key in ("log_every", "eval_every", "checkpoint_every",
              "keep_checkpoints")
} | {("name",)}

# Workers may join and leave (`caatnet.train.membership`), and with them what is
# said of each of them.
_WORKER = ("parallel", "worker")
_OF_WORKERS = tuple(("outer", key) for key in ("weights", "clients", "overlap"))


def write_config(workdir: pathlib.Path, config: dict[str, Any]) -> None:
  """Stores the run's config, or checks that the stored one is the same.

  Args:
    workdir: The run's folder.
    config: The run's config as plain data.

  Raises:
    ValueError: The folder holds a run of another config; the message names the
      key.
  """
  path = workdir / "config.json"
  if path.exists():
    stored = flatten(json.loads(path.read_text()))
    ours = flatten(json.loads(json.dumps(config)))
    moved = stored.get(_WORKER) != ours.get(_WORKER)
    for key in sorted(stored.keys() | ours.keys()):
      free = key in _FREE or key[0] == "zero"
      free = free or (moved and key in (_WORKER, *_OF_WORKERS))
      if not free and stored.get(key) != ours.get(key):
        raise ValueError(
          f"{workdir} holds a run with config.{'.'.join(key)}="
          f"{stored.get(key)!r}, this one has {ours.get(key)!r}; "
          "use another --workdir"
        )
  if jax.process_index() == 0:
    path.write_text(json.dumps(config, indent=2) + "\n")


def check_data(workdir: pathlib.Path, sha256: str) -> None:
  """Refuses to resume a run with other data, such as another Python's library.

  Args:
    workdir: The run's folder.
    sha256: The hash of the data that would be read now.

  Raises:
    ValueError: The folder's run read other data.
  """
  path = workdir / "environment.json"
  if not path.exists():
    return
  stored = json.loads(path.read_text())["data"]
  if stored["sha256"] != sha256:
    raise ValueError(
      f"{workdir} was trained on other data ({stored['name']}, sha256 "
      f"{stored['sha256'][:16]}, now {sha256[:16]}); see config.data.path, "
      "or use another --workdir"
    )


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
  commit = subprocess.run(
    ["git", "rev-parse", "HEAD"],
    capture_output=True,
    text=True,
    check=False,
    cwd=pathlib.Path(__file__).parent,
  )
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
    "commit": commit.stdout.strip() or "unknown",
  }


class MetricsWriter:
  """Appends to ``metrics.jsonl`` and TensorBoard; only process 0 writes."""

  def __init__(self, workdir: pathlib.Path, first_step: int) -> None:
    """Opens the files, and drops what comes after the step that is resumed.

    A killed run may have recorded steps after its last checkpoint; they are
    made again.

    Args:
      workdir: The run's folder.
      first_step: The number of updates that the resumed state has.
    """
    self._file = self._board = None
    if jax.process_index():
      return
    path = workdir / "metrics.jsonl"
    kept = []
    if path.exists():
      for line in path.read_text().splitlines():
        try:
          record = json.loads(line)
        except json.JSONDecodeError:
          break  # the line during which the run was killed
        if record["step"] <= first_step:
          kept.append(line)
    path.write_text("".join(line + "\n" for line in kept))
    self._file = path.open("a", buffering=1)
    self._board = SummaryWriter(
      str(workdir / "tensorboard"), purge_step=first_step + 1
    )

  def write(self, step: int, values: dict[str, Any]) -> None:
    """Adds one record of scalars to both."""
    if self._file is None:
      return
    self._file.write(json.dumps({"step": step, **values}) + "\n")
    for key, value in values.items():
      if value is not None:  # it was not finite
        self._board.add_scalar(key, value, step)

  def close(self) -> None:
    """Flushes and closes both."""
    if self._file is not None:
      self._file.close()
      self._board.close()


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the records of a run's ``metrics.jsonl``, in order."""
  lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]
