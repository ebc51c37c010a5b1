"""Arrays in .npz and .npy files, whose faults are ValueErrors."""

import os
import pathlib
import tokenize
import zipfile
import zlib

import numpy as np

# numpy and zipfile raise all of these for damaged files: RuntimeError, for
# example, for one that claims to be encrypted, and errors of Python's parser
# for the header of an array.
DAMAGED = (
  OSError, EOFError, MemoryError, RuntimeError, SyntaxError, TypeError,
  ValueError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Returns the arrays of an .npz file.

  Raises:
    ValueError: The file is missing or damaged.
  """
  file = pathlib.Path(path)
  if file.exists() and not file.is_file():  # opening a FIFO would block
    raise ValueError("it is not a regular file")
  try:
    # numpy does not close a damaged archive that it has opened itself.
    with open(file, "rb") as opened, np.load(
      opened, allow_pickle=False
    ) as arrays:
      return {name: arrays[name] for name in arrays.files}
  except AttributeError as error:  # an .npy file
    raise ValueError("it has no names of arrays") from error
  except DAMAGED as error:
    raise ValueError(str(error) or type(error).__name__) from error


def map_npy(path: str | os.PathLike[str]) -> np.ndarray:
  """Maps an .npy file into memory.

  Raises:
    ValueError: The file is missing or damaged.
  """
  try:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
  except DAMAGED as error:
    raise ValueError(str(error) or type(error).__name__) from error
  if not isinstance(found, np.ndarray):  # an .npz file
    found.close()
    raise ValueError("it is not an .npy file")
  return found
