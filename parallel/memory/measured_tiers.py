"""Measurement of this machine's tiers: NUMA nodes, a file, device copies.

The rate of a NUMA node is that of the largest array with all cores; its range
also covers a single thread, and all arrays larger than twice the last-level
cache. On all tiers, steps of the host optimizer are timed for each array size;
rates of files are computed from them. Rates of device copies are medians.
"""

from collections.abc import Callable, Sequence
import errno
import itertools
import os
import pathlib
import platform
import re
import statistics
import time

import numpy as np

from parallel.memory import host_memory
from parallel.memory.host_optimizer import (
  ARRAYS,
  ELEMENT_MOVED_BYTES,
  ELEMENT_READ_BYTES,
  ELEMENT_WRITTEN_BYTES,
  AdamW,
  HostOptimizer,
)
from parallel.plans.hardware import tiers
from parallel.plans.hardware.tiers import (
  Host,
  OptimizerPass,
  Quantity,
  SharedLink,
  Tier,
)
from parallel.plans.placement import rates

_CPUS = pathlib.Path("/sys/devices/system/cpu")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_FLOAT = 4  # bytes
# Elements of a file that are requested while the previous ones are read.
_PREFETCH_ELEMENTS = 2**26
LEARNING_RATE = 1e-3
# Quick steps are repeated for this many seconds, at most `_MAX_REPEATS` times.
_REPEAT_S, _MAX_REPEATS = 1.0, 50
# Seconds of untimed steps before a timed step in memory: after a wait for a
# disk, threads sleep and caches hold other data.
_WARM_S = 0.02


def measure_to_json(
  sizes: Sequence[str], file: str, nodes: Sequence[str]
) -> tuple[str, str]:
  """Runs `measure` for options given as texts, and prints its progress.

  Args:
    sizes: Bytes of arrays, as texts such as 64e6; () for `default_sizes`.
    file: Path of a file to measure; "" for none.
    nodes: Numbers of NUMA nodes, as texts; () for all.

  Returns:
    JSON text of the tiers, and a description such as "2 tiers".

  Raises:
    ValueError: A text is not a valid number, or `measure` raises it.
    OSError: The file cannot be written.
  """
  host = measure(
    [_parse_size(text) for text in sizes] or default_sizes(),
    pathlib.Path(file) if file else None,
    [_parse_node(text) for text in nodes],
  )
  count = len(host.tiers)
  return tiers.to_json(host), f"{count} tier{'s' if count > 1 else ''}"


def default_sizes() -> list[int]:
  """Returns array sizes in bytes, the largest >= 4 x the last-level cache."""
  return [8 * 10**6, 64 * 10**6, max(256 * 10**6, 4 * cache_bytes())]


def _parse_size(text: str) -> int:
  """Parses a number of bytes such as 64e6."""
  try:
    size = float(text)
  except ValueError as error:
    raise ValueError(
      f"--sizes={text} must be numbers of bytes, as in 1e9,4e9"
    ) from error
  if not 1e6 <= size < 1e13:
    raise ValueError(f"--sizes={text} must lie in [1e6, 1e13) bytes")
  return int(size)


def _parse_node(text: str) -> int:
  """Parses the number of a node."""
  if not text.isdecimal():
    raise ValueError(
      f"--numa_nodes={text} must be numbers of NUMA nodes, as in 0,1"
    )
  return int(text)


def measure(
  sizes: Sequence[int],
  path: pathlib.Path | None = None,
  nodes: Sequence[int] = (),
  progress: Callable[[str], None] = print,
) -> Host:
  """Measures NUMA nodes, a file, and device copies of this machine.

  Args:
    sizes: Bytes of arrays; three arrays of one size are allocated at a time.
    path: New path for a tier; temporary files in its folder are measured. None
      for no such tier.
    nodes: Numbers of NUMA nodes; () for all.
    progress: Receives one line for each measurement.

  Returns:
    The tiers' rates, and those of the link to JAX's default device. If it is a
    CPU, copies in memory are measured instead, which ``source`` states.

  Raises:
    ValueError: numba is not installed, the arrays do not fit, a node does not
      exist, or no array is larger than the last-level cache.
    OSError: The file cannot be written.
  """
  cache = cache_bytes()
  if max(sizes) <= 2 * cache:
    raise ValueError(
      f"--sizes={','.join(map(str, sizes))}: the largest array must exceed "
      f"{2 * cache} bytes, twice the last-level cache"
    )
  for node in nodes:
    host_memory.check_node(node)
  if path is not None:
    _check_disk(path, len(ARRAYS) * max(sizes))  # before all measurements
  found = [
    _measure_node(node, sizes, cache, progress)
    for node in nodes or host_memory.nodes()
  ]
  if path is not None:
    found.append(_measure_file(path, sizes, cache, progress))
  return tiers.check_host(Host(
    name=platform.node() or "this machine",
    source="measured by launch.measure",
    device_link=_device_link(max(sizes), progress), links=(),
    tiers=tuple(found),
  ))


def cache_bytes() -> int:
  """Returns the size of all last-level caches; 32 MiB if unknown."""
  sizes = {}  # CPUs that share a cache -> its size
  for folder in _CPUS.glob("cpu[0-9]*/cache/index3"):
    match = re.fullmatch(r"(\d+)([KMG])", (folder / "size").read_text().strip())
    if match:
      shared = (folder / "shared_cpu_list").read_text()
      sizes[shared] = int(match[1]) * _UNITS[match[2]]
  return sum(sizes.values()) or 2**25


def _quantity(values: Sequence[float], source: str) -> Quantity:
  """Returns the last value as a quantity with the range of all values."""
  return Quantity(
    value=values[-1], low=min(values), high=max(values), source=source
  )


def _median(values: Sequence[float], source: str) -> Quantity:
  """Returns the median of an odd number of values, with their range."""
  return _quantity([*values, statistics.median(values)], source)


def _arrays(size: int, node: int) -> list[np.ndarray]:
  """Returns three float32 arrays of ``size`` bytes each on a node."""
  arrays = [
    host_memory.allocate(size, node=node).view(np.float32) for _ in range(3)
  ]
  for array in arrays:
    array.fill(0)
  wrong = set(host_memory.nodes_of(arrays[0])) - {node}
  assert not wrong, f"pages of node {node} are on {wrong}"
  return arrays


def _measure_node(
  node: int, sizes: Sequence[int], cache: int, progress: Callable[[str], None]
) -> Tier:
  """Measures rates and latency of a NUMA node.

  Args:
    node: Number of the node.
    sizes: Bytes of the arrays.
    cache: Bytes of the last-level caches. Rates of arrays up to twice this size
      are not used.
    progress: Receives one line for each measurement.
  """
  free = host_memory.free_bytes(node)
  if 3 * max(sizes) > free:
    raise ValueError(
      f"node {node} has {free / 1e9:.1f} GB of free memory, and three arrays "
      f"of {max(sizes) / 1e9:.1f} GB are needed; use smaller --sizes"
    )
  counts = sorted({1, os.cpu_count() or 1})
  found, arrays = [], None
  for count, size in itertools.product(counts, sorted(sizes)):
    del arrays  # before others are allocated
    arrays = _arrays(size // _FLOAT * _FLOAT, node)
    seen = rates.measure(arrays, count)
    texts = [f"{name} {rate / 1e9:.1f}" for name, rate in seen.items()]
    progress(
      f"node {node}, {size / 1e6:,.1f} MB, {count} threads: "
      f"{', '.join(texts)} GB/s"
    )
    if size > 2 * cache:
      found.append(seen)
  delay = rates.latency_s(arrays[0].view(np.uint8))
  progress(f"node {node}: {1e9 * delay:.0f} ns per dependent load")
  del arrays
  passes = [_measure_pass(node, size) for size in sorted(sizes)]
  for one in passes:
    progress(f"node {node}: {_format_pass(one)}")
  source = f"measured, {counts[-1]} cores, {max(sizes) / 1e6:,.0f} MB; range " \
    "over sizes beyond the cache and numbers of threads"
  return Tier(
    name=f"node{node}", kind="dram" if _has_cores(node) else "cxl", node=node,
    capacity_bytes=_quantity([free], "free memory at the time"),
    read=_quantity([x["read"] for x in found], source),
    write=_quantity([x["write"] for x in found], source),
    latency_s=_quantity([delay], "measured, chain of dependent loads"),
    duplex=False, passes=tuple(passes),
  )


def _has_cores(node: int) -> bool:
  """Returns whether a node has CPUs; memory behind CXL has none."""
  path = pathlib.Path(f"/sys/devices/system/node/node{node}/cpulist")
  return not path.exists() or bool(path.read_text().strip())


def _check_disk(path: pathlib.Path, size: int) -> int:
  """Returns the free bytes of a new file's disk; raises if they are too few."""
  if path.exists():
    raise FileExistsError(errno.EEXIST, "File exists", str(path))
  if not path.parent.is_dir():
    raise ValueError(
      f"--file={path} must be in an existing folder, but {path.parent} is not "
      "a folder"
    )
  stat = os.statvfs(path.parent)
  free = stat.f_bavail * stat.f_frsize
  if size > free:
    raise ValueError(
      f"--file={path}: {size / 1e9:.1f} GB do not fit into the "
      f"{free / 1e9:.1f} GB that are free"
    )
  return free


def _measure_file(
  path: pathlib.Path, sizes: Sequence[int], cache: int,
  progress: Callable[[str], None],
) -> Tier:
  """Measures bandwidths of a mapped file, dropped from memory after use.

  Arguments are those of `_measure_node`.
  """
  free = _check_disk(path, len(ARRAYS) * max(sizes))
  passes = [_measure_pass(str(path.parent), size) for size in sorted(sizes)]
  for found in passes:
    progress(f"file {path}: {_format_pass(found)}")
  read, write = (
    _quantity(
      [x.size_bytes / getattr(x, f"{name}_s") for x in passes
       if x.size_bytes > 2 * cache],
      f"measured, {text}; range over sizes beyond the cache",
    ) for name, text in (
      ("read", "until dropped from memory"), ("write", "until on disk")
    )
  )
  return Tier(
    name="file", kind="file", path=str(path), duplex=False,
    capacity_bytes=_quantity([free], "free space at the time"),
    read=read, write=write, passes=tuple(passes),
    latency_s=_quantity([0.0], "not measured"),
  )


def _measure_pass(tier: int | str, size: int) -> OptimizerPass:
  """Returns times of optimizer steps on a node, or on a file in a folder.

  A step reads all four arrays and writes three of them. After a step, files are
  written to disk and dropped from memory, so that the next step reads the disk.

  Args:
    tier: The node or the folder.
    size: Bytes of each of the four arrays.
  """
  count = size // _FLOAT
  made = HostOptimizer(
    count, AdamW(), {name: {tier: 1.0} for name in ARRAYS}
  )
  made.gradients.fill(1)
  once_s = step_s(made)
  rounds = max(rates.NUM_REPEATS, min(_MAX_REPEATS, int(_REPEAT_S / once_s)))
  # Alternating, so that a drift of the machine's speed affects both.
  found = [(step_s(made), _read_s(made)) for _ in range(1 + rounds)]
  update_s, read_s = map(statistics.median, zip(*found[1:], strict=True))
  read_s, write_s = _split_step_seconds(update_s, read_s, isinstance(tier, int))
  return OptimizerPass(
    size_bytes=ELEMENT_READ_BYTES * count, read_s=read_s, write_s=write_s
  )


def _split_step_seconds(
  update_s: float, read_s: float, is_memory: bool
) -> tuple[float, float]:
  """Returns seconds of reading and of writing all bytes, given those of a step.

  Args:
    update_s: Seconds of a step, which reads 16 bytes of an element and writes
      12.
    read_s: Seconds of reading alone.
    is_memory: Whether the state is in memory, not in a file. A step reads and
      writes memory concurrently, so time is divided in proportion to bytes.
  """
  if is_memory:
    read_s = update_s * ELEMENT_READ_BYTES / ELEMENT_MOVED_BYTES
  # For small sizes, noise can exceed the difference.
  write_s = max(update_s - read_s, update_s / 100)
  return read_s, write_s * ELEMENT_READ_BYTES / ELEMENT_WRITTEN_BYTES


def step(optimizer: HostOptimizer) -> None:
  """Runs one step of an optimizer on all its elements."""
  optimizer.begin(LEARNING_RATE)
  optimizer.update(0, optimizer.gradients)
  optimizer.end()


def step_s(optimizer: HostOptimizer) -> float:
  """Returns an optimizer step's seconds, for files with `Buffer.drop`."""
  if not optimizer.buffer.has_files:  # with files, there is nothing to warm up
    end = time.perf_counter() + _WARM_S
    step(optimizer)
    while time.perf_counter() < end:
      step(optimizer)
  start = time.perf_counter()
  step(optimizer)
  optimizer.buffer.drop()
  return time.perf_counter() - start


def _read_s(optimizer: HostOptimizer) -> float:
  """Returns the seconds of reading the optimizer's arrays from their tier.

  With files, they include `Buffer.drop`.
  """
  start = time.perf_counter()
  flat = optimizer.buffer.array.view(np.float32)
  optimizer.buffer.prefetch(0, _FLOAT * _PREFETCH_ELEMENTS)
  for begin in range(0, len(flat), _PREFETCH_ELEMENTS):
    end = begin + _PREFETCH_ELEMENTS
    optimizer.buffer.prefetch(_FLOAT * end, _FLOAT * (end + _PREFETCH_ELEMENTS))
    rates.read(flat[begin:end])
  optimizer.buffer.drop()
  return time.perf_counter() - start


def _format_pass(found: OptimizerPass) -> str:
  return (
    f"optimizer, {found.size_bytes / 1e6:,.1f} MB: read in "
    f"{1e3 * found.read_s:.1f} ms, written in {1e3 * found.write_s:.1f} ms more"
  )


def _device_link(size: int, progress: Callable[[str], None]) -> SharedLink:
  """Measures copies between host and JAX's default device."""
  import jax

  device = jax.devices()[0]
  host = np.ones(size // _FLOAT, np.float32)
  there, back = [], []
  jax.device_put(host, device, may_alias=False).block_until_ready()
  for _ in range(rates.NUM_REPEATS):
    start = time.perf_counter()
    moved = jax.device_put(host, device, may_alias=False).block_until_ready()
    there.append(size / (time.perf_counter() - start))
    start = time.perf_counter()
    np.array(moved, copy=True)
    back.append(size / (time.perf_counter() - start))
  source = (
    f"measured, copies of {size / 1e6:,.0f} MB of pageable memory, "
    f"{device.device_kind}"
  )
  if device.platform == "cpu":
    source += ": copies in memory, since the device is a CPU"
  read, write = _median(there, source), _median(back, source)
  progress(f"device: {read.value / 1e9:.1f} GB/s there, "
           f"{write.value / 1e9:.1f} back")
  return SharedLink(
    name=device.platform, duplex=device.platform != "cpu",
    read=read, write=write,
  )
