"""Atomic replacement of local files."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import secrets


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Context manager that replaces a local file atomically.

  At any time the file has either its old content or a complete new one, even if
  this process is killed or several processes write the file. When the context
  ends, the new content is on disk. The parent folder is created.

  Args:
    path: The file.

  Yields:
    A temporary path with the suffix of ``path``, to be written in the context.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  # A unique name, since other processes may be writing the same file.
  own = f".{path.stem}.{os.getpid()}_{secrets.token_hex(4)}{path.suffix}"
  temporary = path.with_name(own)
  try:
    with name_file_in_errors(path):
      yield temporary
    # Without fsync, the file may be empty after a power failure.
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)
  finally:
    temporary.unlink(missing_ok=True)


def check_writable(
  path: str | os.PathLike[str], flag: str = "", is_folder: bool = False
) -> None:
  """Checks that a path can be written, before a long computation for it.

  Args:
    path: The file or folder, which may exist. Missing parents are allowed.
    flag: Beginning of the error message, such as ``--output=``.
    is_folder: Whether ``path`` is a folder rather than a file.

  Raises:
    ValueError: If the path exists but is not a file (or folder, as requested),
      or its closest existing parent is not a writable folder.
  """
  path = pathlib.Path(path)
  above = next(p for p in path.absolute().parents if os.path.lexists(p))
  if not above.is_dir():
    reason = f"{above} is not a folder"
  elif not os.access(above, os.W_OK | os.X_OK):
    reason = f"{above} is read-only"
  elif path.exists() and not (path.is_dir() if is_folder else path.is_file()):
    # Refused, since writing would replace a device such as /dev/null.
    reason = f"it is not a {'folder' if is_folder else 'file'}"
  else:
    return
  raise ValueError(f"{flag}{path} cannot be written: {reason}")


def remove_unfinished(path: str | os.PathLike[str]) -> None:
  """Removes temporary files of processes that were killed in `atomic_file`.

  Args:
    path: The file, which no process may be writing at the moment.
  """
  path = pathlib.Path(path)
  for left in path.parent.glob(f".{path.stem}.*_*{path.suffix}"):
    left.unlink(missing_ok=True)


@contextlib.contextmanager
def name_file_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
  """Context manager that adds a file's name to an OSError without a name.

  An error while reading or writing an open file does not name the file.
  """
  try:
    yield
  except OSError as error:
    if error.errno is not None and error.filename is None:
      error.filename = os.fspath(path)
    raise


def _sync(path: pathlib.Path) -> None:
  """Waits until a file, or the list of a folder's files, is on disk."""
  opened = os.open(path, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)
