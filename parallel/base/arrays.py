"""Readers of .npz and .npy files, which raise ValueErrors for damaged files."""

from collections.abc import Iterable
import mmap
import os
import pathlib
import tokenize
import zipfile
import zlib

import numpy as np

# Exceptions that numpy and zipfile raise for damaged files. For example, damage
# that marks a file as encrypted gives a RuntimeError, and damage to the header
# of an array gives errors of Python's parser.
DAMAGED_FILE_ERRORS = (
  OSError, EOFError, MemoryError, RuntimeError, SyntaxError, TypeError,
  ValueError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Returns the arrays of an .npz file.

  Raises:
    ValueError: The file is missing, damaged or no .npz file.
  """
  file = pathlib.Path(path)
  if file.exists() and not file.is_file():  # opening a FIFO would block
    raise ValueError("it is not a regular file")
  try:
    # numpy does not close a damaged archive that it has opened itself.
    with open(file, "rb") as opened:
      found = np.load(opened, allow_pickle=False)
      if isinstance(found, np.ndarray):  # an .npy file
        raise ValueError("it is not an .npz file of named arrays")
      with found as arrays:
        return {name: arrays[name] for name in arrays.files}
  except DAMAGED_FILE_ERRORS as error:
    raise ValueError(str(error) or type(error).__name__) from error


def map_npy(path: str | os.PathLike[str]) -> np.ndarray:
  """Returns the array of an .npy file, mapped into memory.

  Raises:
    ValueError: The file is missing or damaged.
  """
  try:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
  except DAMAGED_FILE_ERRORS as error:
    raise ValueError(str(error) or type(error).__name__) from error
  if not isinstance(found, np.ndarray):  # an .npz file
    found.close()
    raise ValueError("it is not an .npy file")
  return found


def disable_readahead(arrays: Iterable[np.ndarray], room: int) -> bool:
  """Disables readahead of mapped arrays if they do not fit into memory.

  On a page fault, the operating system also reads adjacent pages (unless
  MADV_RANDOM is set), since most programs read sequentially. Features and
  neighbours of graph nodes are read in random order: if the file is larger than
  memory, each row of 512 bytes would cost a read of 128 KiB, which evicts pages
  that are still in use. Arrays that fit into memory are read from disk once,
  which is faster with readahead.

  Args:
    arrays: Arrays of `numpy.memmap`; other arrays are ignored.
    room: Bytes of memory that the arrays may use together.

  Returns:
    Whether readahead was disabled.
  """
  arrays = list(arrays)
  if sum(x.nbytes for x in arrays) <= room or not hasattr(mmap, "MADV_RANDOM"):
    return False
  for array in arrays:
    mapped = getattr(array, "_mmap", None)
    if mapped is not None:
      mapped.madvise(mmap.MADV_RANDOM)
  return True
