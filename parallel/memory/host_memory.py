"""Host memory on NUMA nodes, by Linux system calls.

`allocate` returns an array whose pages are on one node (``mbind`` before the
first touch); `nodes_of` returns the nodes of an array's pages, and `move` moves
the pages (``move_pages``).

Example:
  >>> import numpy as np
  >>> from parallel.memory import host_memory
  >>> node = host_memory.nodes()[0]
  >>> x = host_memory.allocate(2**20, node=node)
  >>> x[:] = 1  # first touch
  >>> set(host_memory.nodes_of(x)) == {node}
  True
"""

import ctypes
import mmap
import os
import pathlib
import platform

import numpy as np

# Numbers of the system calls mbind and move_pages.
_SYSCALL_NUMBERS = {"x86_64": (237, 279), "aarch64": (235, 239)}
_BIND = 2  # MPOL_BIND
_MOVE = 2  # MPOL_MF_MOVE: pages that only this process maps
_MASK_WORDS = 16  # 1,024 nodes, as in Linux
PAGE = mmap.PAGESIZE
_SYSTEM = pathlib.Path("/sys/devices/system/node")


def nodes() -> list[int]:
  """Returns the numbers of the NUMA nodes with memory; [0] if unknown."""
  try:
    text = (_SYSTEM / "has_memory").read_text()
  except OSError:
    return [0]
  found: list[int] = []
  for part in text.strip().split(","):  # as in "0-1,4"
    first, _, last = part.partition("-")
    found += range(int(first), int(last or first) + 1)
  return found


def free_bytes(node: int) -> int:
  """Returns the free bytes of a node, excluding reclaimable file caches."""
  check_node(node)
  path = _SYSTEM / f"node{node}/meminfo"
  if not path.exists():
    return os.sysconf("SC_AVPHYS_PAGES") * PAGE
  for line in path.read_text().splitlines():
    if "MemFree:" in line:
      return 1024 * int(line.split()[-2])
  raise AssertionError(f"{path} has no MemFree")


def check_node(node: int) -> None:
  """Raises ValueError for a node that this machine does not have."""
  found = nodes()
  if node not in found:
    raise ValueError(
      f"node={node} does not exist; the nodes of this machine are "
      f"{', '.join(map(str, found))}"
    )


def allocate(size: int, node: int) -> np.ndarray:
  """Allocates memory on a node.

  Args:
    size: Number of bytes.
    node: Node of the pages.

  Returns:
    uint8 ``[size]``, zeros.

  Raises:
    ValueError: The node does not exist.
    OSError: A system call fails.
  """
  check_node(node)
  area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  made = np.frombuffer(area, np.uint8)
  bind(made, node)
  return made


def bind(array: np.ndarray, node: int) -> None:
  """Sets the node of pages that have not been touched yet.

  Args:
    array: Memory that consists of whole pages.
    node: Node for the pages.

  Raises:
    ValueError: The node does not exist.
    OSError: A system call fails.
  """
  check_node(node)
  mask = (ctypes.c_ulong * _MASK_WORDS).from_buffer_copy(
    (1 << node).to_bytes(8 * _MASK_WORDS, "little")
  )
  # Linux reads one bit of the mask less than the given count.
  _syscall(
    0, array.ctypes.data, array.nbytes, _BIND, mask, 64 * _MASK_WORDS + 1, 0
  )


def move(array: np.ndarray, node: int) -> None:
  """Moves touched pages to a node, and binds them to it.

  Args:
    array: Memory that consists of whole pages, all of them touched.
    node: New node of the pages.

  Raises:
    ValueError: The node does not exist.
    OSError: A system call fails, or a page has not been touched yet.
  """
  bind(array, node)
  count = -(-array.nbytes // PAGE)
  pages = (ctypes.c_void_p * count)(
    *range(array.ctypes.data, array.ctypes.data + array.nbytes, PAGE)
  )
  _query_or_move(pages, (ctypes.c_int * count)(*[node] * count))


def nodes_of(array: np.ndarray, most: int = 1024) -> list[int]:
  """Returns the nodes of up to ``most`` pages of an array, evenly spaced.

  Raises:
    OSError: A system call fails, or a page has not been touched yet.
  """
  start = -(-array.ctypes.data // PAGE) * PAGE  # the first whole page
  count = (array.ctypes.data + array.nbytes - start) // PAGE
  chosen = range(0, count, max(1, -(-count // most)))  # evenly spaced
  return _query_or_move(
    (ctypes.c_void_p * len(chosen))(*(start + PAGE * i for i in chosen)), None
  )


def _query_or_move(
  pages: ctypes.Array, targets: ctypes.Array | None
) -> list[int]:
  """Calls move_pages, which only reports nodes if there are no target nodes.

  Returns:
    The node of each page.
  """
  status = (ctypes.c_int * len(pages))()
  flags = 0 if targets is None else _MOVE
  _syscall(1, 0, len(pages), pages, targets, status, flags)
  failed = [code for code in status if code < 0]
  if failed:
    raise OSError(-failed[0], os.strerror(-failed[0]))
  return list(status)


def _syscall(index: int, *arguments: object) -> None:
  """Calls mbind (0) or move_pages (1); raises OSError if it fails."""
  machine = platform.machine()
  if machine not in _SYSCALL_NUMBERS:
    raise OSError(
      f"NUMA system calls are not supported on {machine} processors"
    )
  library = ctypes.CDLL(None, use_errno=True)
  converted = [
    ctypes.c_long(x) if isinstance(x, int) else x for x in arguments
  ]
  if library.syscall(_SYSCALL_NUMBERS[machine][index], *converted) != 0:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
