"""One-line messages for errors that a full disk causes.

Orbax, TensorStore, safetensors and the standard library report a full disk as
different exceptions, some of them chained.
"""

from collections.abc import Iterator
import errno
import os
import pathlib
import re
import shutil

# Disk full, quota exceeded, file larger than the process may write.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# An absolute path, in quotes or not.
_PATH_PATTERN = re.compile(r"""["'](/[^"']+)["']|(?:^|[\s=])(/[^\s:;"']+)""")


def describe_full_disk(error: BaseException) -> str | None:
  """Returns the error as one line if a disk is full, else None.

  Args:
    error: An exception; its causes and contexts are searched, too.

  Example:
    >>> error = OSError(errno.ENOSPC, "No space left on device", "/dev/full")
    >>> describe_full_disk(error)
    ... # doctest: +ELLIPSIS
    '/dev/full cannot be written: No space left on device (... kB free)'
    >>> describe_full_disk(ValueError("p=2 must be a fraction"))
  """
  found = list(_chain(error))
  number = next((n for e in found if (n := _find_errno(e)) in _FULL), None)
  if number is None:
    return None
  text = " ".join(map(str, found))
  names = [os.fspath(e.filename) for e in found
           if isinstance(e, OSError) and isinstance(e.filename, str | bytes)]
  names += [quoted or plain for quoted, plain in _PATH_PATTERN.findall(text)]
  path = os.fsdecode(names[0]) if names else os.getcwd()
  above = next(
    p for p in (pathlib.Path(path), *pathlib.Path(path).absolute().parents)
    if p.exists()
  )
  free = shutil.disk_usage(above).free
  return (
    f"{path} cannot be written: {os.strerror(number)} ({free / 1e3:,.0f} kB "
    "free)"
  )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """Yields an exception and all exceptions from which it was raised."""
  waiting, seen = [error], set()
  while waiting:
    one = waiting.pop(0)
    if one is not None and id(one) not in seen:
      seen.add(id(one))
      yield one
      waiting += [one.__cause__, one.__context__]
      waiting += getattr(one, "exceptions", ())


def _find_errno(error: BaseException) -> int | None:
  """Returns the error number of the operating system, if there is one."""
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno
  return next((n for n in _FULL if os.strerror(n) in str(error)), None)
