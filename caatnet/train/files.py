"""The files of a run's folder: whole at any time, and written by one trainer.

A folder may be on a cloud. It is a path of `etils.epath`, as in Orbax, which
writes the checkpoints there. Objects of a cloud appear whole, but nothing can
be appended to them, and there are no locks.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import importlib.util
import itertools
import os
import pathlib
import secrets
import shutil
import socket
from typing import IO, Any

from etils import epath
import jax

# What reads and writes files and TensorBoard events on a cloud, by the start of
# its addresses. Arrays go without: TensorStore has both.
_PACKAGES = {
  "gs://": {"gcsfs": "gcsfs", "google.cloud.storage": "google-cloud-storage"},
  "s3://": {"s3fs": "s3fs", "boto3": "boto3"},
}


def folder(
  path: str | os.PathLike[str], *, local: bool = False, flag: str = "--workdir"
) -> epath.Path:
  """Returns the path of a run's folder, which need not exist.

  Args:
    path: A path of this machine, or an address such as ``gs://bucket/run``.
    local: Whether only a path of this machine will do.
    flag: What messages call the path.

  Raises:
    ValueError: The path is on a cloud of another kind, on any cloud if it has
      to be local, or a package is missing that reads and writes there.
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
  """Says whether a path is an address such as ``gs://bucket/run``."""
  return "://" in os.fspath(path)


def replace(path: pathlib.Path | epath.Path, text: str) -> None:
  """Writes a text in place of the old file; see `whole`."""
  if is_cloud(path):
    path.write_text(text)
    return
  with whole(path) as temporary:
    temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(path: pathlib.Path | epath.Path) -> Iterator[pathlib.Path]:
  """Gives a path to write to; the file there then takes the place of another.

  Whoever reads the other or writes it, too, and whenever this process is
  killed, there is the old file or a new one, and never a part of it. Its folder
  is made.

  Args:
    path: The file on this machine. The path that is given has its suffix.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # A name of its own, since others may be writing the same file.
  own = f".{path.stem}.{os.getpid()}_{secrets.token_hex(4)}{path.suffix}"
  temporary = path.with_name(own)
  try:
    yield temporary
    # Without this a machine that loses power may have the name and no text.
    with open(temporary, "rb") as file:
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def check_new(path: pathlib.Path) -> None:
  """Checks that a folder can be made and has not been.

  Raises:
    FileExistsError: Something has that name.
    ValueError: The folder above it, or above that, cannot be written.
  """
  if os.path.lexists(path):
    raise FileExistsError(f"{path} exists; remove it, or use another name")
  above = next(p for p in path.absolute().parents if os.path.lexists(p))
  if not above.is_dir():
    raise ValueError(f"{path} cannot be written: {above} is no folder")
  if not os.access(above, os.W_OK | os.X_OK):
    raise ValueError(f"{path} cannot be written: {above} is read-only")


@contextlib.contextmanager
def whole_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a folder to write in that gets its name when all is written.

  An error removes it. What a killed process left beside ``path`` is removed by
  the next one that writes there.

  Args:
    path: The folder's name, which nothing has yet; its parent is made.

  Raises:
    FileExistsError: Something has that name.
    ValueError: Another process is writing the same folder, or a file cannot be
      written.
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
      raise ValueError(f"another process is writing {path}") from error
    try:
      for left in partial.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
      yield partial
      os.rename(partial, path)
    except BaseException as error:
      shutil.rmtree(partial)
      if isinstance(error, OSError):  # such as a disk that is full
        raise ValueError(f"{path} cannot be written: {error}") from error
      raise


def lock(workdir: epath.Path) -> contextlib.AbstractContextManager[Any]:
  """Makes this process the only trainer of a folder until the lock is closed.

  The operating system gives the lock back when a process ends, however it does:
  a dead process is never in the way. On NFS it keeps other hosts out, too. Of
  several processes of a run, process 0 has the lock, since it writes the files.
  Where there are no locks, as on a cloud, nobody is kept out.

  Args:
    workdir: The folder, which exists.

  Raises:
    ValueError: Another process has the lock; the message names it.
  """
  if is_cloud(workdir) or jax.process_index():
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
  file.truncate(0)
  file.write(f"process {os.getpid()} on {socket.gethostname()}")
  file.flush()
  return file


def slot(parent: epath.Path, name: str) -> tuple[epath.Path, Any]:
  """Finds a folder for one of several processes of this machine.

  Args:
    parent: In which the folders are; it is made.
    name: What their names begin with.

  Returns:
    The first folder, by its number, that no living process has; and what keeps
    others out as long as it is not closed.
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
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # a package above it is missing
    return False
