"""Atomic writes, strict JSON and locks for the files of a run's folder.

A folder may be in cloud storage. Its path is an `etils.epath`, as in Orbax,
which writes checkpoints there. Objects in cloud storage are replaced
atomically, but they cannot be appended to or locked.
"""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import importlib.util
import itertools
import json
import math
import os
import pathlib
import shutil
import socket
import sys
from typing import IO, Any

from etils import epath

from parallel.base.atomic import (
  atomic_file,
  check_writable,
  name_file_in_errors,
)

# Scheme of an address -> {module: package} needed for files and for TensorBoard
# events. Arrays need no package: TensorStore supports both schemes.
_PACKAGES = {
  "gs://": {"gcsfs": "gcsfs", "google.cloud.storage": "google-cloud-storage"},
  "s3://": {"s3fs": "s3fs", "boto3": "boto3"},
}


def parse_folder(
  path: str | os.PathLike[str], *, local: bool = False, flag: str = "--workdir"
) -> epath.Path:
  """Returns the path of a run's folder, which may not exist yet.

  Args:
    path: A local path, or an address such as ``gs://bucket/run``.
    local: Whether the path must be local.
    flag: Name of the path in error messages.

  Raises:
    ValueError: If the kind of cloud storage is not supported, ``local`` is set
      for an address in cloud storage, or a package is missing.
  """
  if not is_cloud(path):
    return epath.Path(path)
  packages = _PACKAGES.get(f"{str(path).partition('://')[0]}://")
  if local or packages is None:
    kinds = "" if local else f", or start with {' or '.join(_PACKAGES)}"
    raise ValueError(f"{flag}={path} must be on this machine{kinds}")
  missing = [
    package for module, package in packages.items() if not _is_there(module)
  ]
  if missing:
    raise ValueError(f"{flag}={path} needs pip install {' '.join(missing)}")
  return epath.Path(path)


def is_cloud(path: os.PathLike[str]) -> bool:
  """Returns whether a path is an address such as ``gs://bucket/run``."""
  return "://" in os.fspath(path)


def replace(path: pathlib.Path | epath.Path, text: str) -> None:
  """Replaces a file by the given text atomically; see `atomic_file`."""
  if is_cloud(path):
    path.write_text(text)
    return
  with atomic_file(path) as temporary:
    temporary.write_text(text, encoding="utf-8")


def to_json(data: Any, indent: int | None = None) -> str:
  """Returns data as JSON text, in which NaN and infinity are null.

  JSON cannot represent them. A warning on stderr names the first such value.

  Args:
    data: Plain data.
    indent: Indentation of nested values; None for one line.

  Example:
    >>> to_json({"loss": 2.5, "steps": [1, 2]})
    '{"loss": 2.5, "steps": [1, 2]}'
  """
  try:
    return json.dumps(data, indent=indent, allow_nan=False)
  except ValueError:
    missing: list[str] = []
    finite = _replace_nonfinite(data, "", missing)
    if not missing:
      raise
    found = json.dumps(finite, indent=indent)
    others = f" and {len(missing) - 1} more" if missing[1:] else ""
    print(
      f"warning: {missing[0]}{others}: no finite number; null in JSON",
      file=sys.stderr,
    )
    return found


def read_json(path: pathlib.Path | epath.Path) -> dict[str, Any]:
  """Returns the JSON object in a file.

  Raises:
    ValueError: The file is damaged; the message names it.
  """
  try:
    found = json.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is damaged: {error}") from error
  if not isinstance(found, dict):
    raise ValueError(f"{path} is damaged: it must contain a JSON object")
  return found


def _replace_nonfinite(value: Any, name: str, missing: list[str]) -> Any:
  """Replaces NaN and infinity by None; appends their paths to ``missing``."""
  if isinstance(value, Mapping):
    return {
      k: _replace_nonfinite(x, f"{name}.{k}" if name else str(k), missing)
      for k, x in value.items()
    }
  if isinstance(value, list | tuple):
    return [
      _replace_nonfinite(x, f"{name}[{i}]", missing)
      for i, x in enumerate(value)
    ]
  if isinstance(value, float) and not math.isfinite(value):
    missing.append(name)
    return None
  return value


def check_new(path: pathlib.Path) -> None:
  """Checks that a folder does not exist and can be created.

  Raises:
    FileExistsError: If the path exists.
    ValueError: If its closest existing parent is not a writable folder.
  """
  if os.path.lexists(path):
    raise FileExistsError(f"{path} exists; remove it, or use another name")
  check_writable(path, is_folder=True)


@contextlib.contextmanager
def atomic_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Context manager that creates a folder with all of its files, or none.

  The folder is renamed to ``path`` at the end, and removed after an error.
  Partial files of a killed process are removed by the next process that writes
  the same folder.

  Args:
    path: The folder, which must not exist; its parent is created.

  Yields:
    The temporary folder, to be written in the context.

  Raises:
    FileExistsError: If ``path`` exists.
    ValueError: If another process is writing the same folder, or a file cannot
      be written.
  """
  check_new(path)
  partial = path.with_name(f".{path.name}.partial")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir(exist_ok=True)
  except OSError as error:
    raise ValueError(f"{path} cannot be written: {error.strerror}") from error
  with contextlib.ExitStack() as opened:
    opened.callback(os.close, descriptor := os.open(partial, os.O_RDONLY))
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f"{path} is being written by another process; wait for it, or choose "
        "another name"
      ) from error
    try:
      for left in partial.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
      with name_file_in_errors(path):
        yield partial
      os.rename(partial, path)
    except BaseException as error:
      shutil.rmtree(partial)
      if isinstance(error, OSError):  # for example a full disk
        raise ValueError(f"{path} cannot be written: {error}") from error
      raise


def lock(
  workdir: epath.Path, process: int = 0
) -> contextlib.AbstractContextManager[Any]:
  """Locks a folder, so that this process is its only trainer.

  The operating system releases the lock when the process ends for any reason.
  On NFS the lock also excludes processes on other hosts. In a run of several
  processes, process 0 holds the lock, since it writes the files. File systems
  without locks, such as cloud storage, are not protected.

  Args:
    workdir: The folder, which exists.
    process: Number of this process.

  Returns:
    A context manager that holds the lock until it is closed.

  Raises:
    ValueError: If another process holds the lock; the message names it.
  """
  if is_cloud(workdir) or process:
    return contextlib.nullcontext()
  file: IO[str] = open(workdir / "lock", "a+", encoding="utf-8")  # noqa: SIM115
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    file.seek(0)
    holder = file.read().strip() or "another process"
    file.close()
    raise ValueError(
      f"--workdir={workdir} is in use: {holder} is training there; wait for "
      "it, stop it, or use another --workdir"
    ) from error
  except OSError:  # a file system without locks
    pass
  with name_file_in_errors(workdir / "lock"):
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
  return file


def reserve_folder(parent: epath.Path, name: str) -> tuple[epath.Path, Any]:
  """Reserves a numbered folder for one of several processes of this machine.

  Args:
    parent: The parent of the folders; it is created.
    name: Prefix of the folders' names.

  Returns:
    The path ``parent/name-N`` with the smallest N that no running process has
    reserved; and an open lock file, which reserves the path until it is closed.
  """
  parent.mkdir(parents=True, exist_ok=True)
  for number in itertools.count():
    found = parent / f"{name}-{number}"
    file = open(f"{found}.lock", "a", encoding="utf-8")  # noqa: SIM115
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    try:
      fcntl.flock(file, exclusive)
    except BlockingIOError:
      file.close()
      continue
    return found, file
  raise AssertionError


def _is_there(module: str) -> bool:
  """Returns whether a module is installed."""
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # its parent package is missing
    return False
