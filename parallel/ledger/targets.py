"""Compilation targets: devices that the compiling machine does not need.

XLA compiles the target's executable, so that its memory analysis, collectives
and schedule equal those on real devices. Execution times are not available.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import os
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies

from parallel.plans.hardware.clusters import CLUSTERS, Level
from parallel.plans.hardware.devices import DEVICES, Device
from parallel.plans.hardware.link_matrix import LinkMatrix
from parallel.plans.hardware.slices import SLICE_RULES

# Syntax of a target's name, for help texts and errors.
SYNTAX = (
  "tpu:GENERATION:TOPOLOGY[:SLICES] as in tpu:v5p:4x4x4, gpu:NAME:NODESxGPUS "
  "as in gpu:h200:1x8, or cpu:N"
)

# Generation -> (accelerator type, chip configuration), in libtpu's names. The
# type names an arbitrary slice of the generation; the requested topology
# replaces its shape. "megacore" exposes the two cores of a chip as one device.
_TPUS = {
  "v4": ("v4-8", "megacore"),
  "v5e": ("v5litepod-4", "default"),
  "v5p": ("v5p-8", "megacore"),
  "v6e": ("v6e-4", "default"),
  "tpu7x": ("tpu7x-8", "default"),
}
# File that libtpu locks while a process has it loaded.
_TPU_LOCK = "/tmp/libtpu_lockfile"


@dataclasses.dataclass(frozen=True)
class Target:
  """Compilation target: devices, their rates and links.

  Attributes:
    name: Name of the target as the user wrote it.
    devices: Descriptions of the devices, valid for `jax.sharding.Mesh`.
    hardware: Rates and memory of one device; None for CPUs, for which none are
      recorded.
    levels: Network levels: nested groups of devices with their links, innermost
      first. A TPU slice is one level. Links between slices are not included.
    links: Measured links, which replace those of the levels; None for the
      published ones.
  """

  name: str
  devices: tuple[jax.Device, ...]
  hardware: Device | None
  levels: tuple[Level, ...]
  links: LinkMatrix | None = None

  @property
  def shares_processors(self) -> bool:
    """Whether a device that waits leaves its processors to other devices."""
    return self.name.startswith("cpu:")

  @property
  def num_slices(self) -> int:
    """Number of TPU slices, for each of which XLA compiles a program."""
    return len({getattr(d, "slice_index", 0) for d in self.devices}) if (
      self.name.startswith("tpu:")
    ) else 1


def resolve(name: str) -> Target:
  """Returns the target with a given name.

  Args:
    name: Name in the form of ``SYNTAX``.

  Returns:
    The target. The devices of ``cpu:N`` are the first N CPU devices of this
    process, which the flag ``--cpu_devices=N`` creates.

  Raises:
    ValueError: The name is unknown, the topology does not exist, or an extra of
      this package is not installed.

  Example:
    >>> target = resolve("cpu:1")
    >>> len(target.devices), target.hardware
    (1, None)
  """
  kind, *rest = name.split(":")
  if kind == "tpu" and len(rest) in (2, 3):
    return _tpu(name, *rest)
  if kind == "gpu" and len(rest) == 2:
    return _gpu(name, *rest)
  if kind == "cpu" and len(rest) == 1 and re.fullmatch(r"[1-9]\d*", rest[0]):
    devices = tuple(jax.devices("cpu"))
    if len(devices) < int(rest[0]):
      raise ValueError(
        f"--target={name} needs more than the {len(devices)} CPU devices of "
        f"this process; also pass --cpu_devices={rest[0]}"
      )
    return Target(name, devices[: int(rest[0])], None, ())
  raise ValueError(f"--target={name!r} must have the form {SYNTAX}")


def with_measured_links(target: Target, links: LinkMatrix) -> Target:
  """Returns a target with the rates of a measured cluster.

  Raises:
    ValueError: The cluster has fewer devices than the target.
  """
  if links.num_devices < len(target.devices):
    raise ValueError(
      f"--cluster: {links.name!r} has {links.num_devices} devices, but "
      f"--target={target.name} needs {len(target.devices)}"
    )
  return dataclasses.replace(target, hardware=links.device, links=links)


@contextlib.contextmanager
def patch_jax_devices(devices: Sequence[jax.Device]) -> Iterator[None]:
  """Makes jax list, count and build meshes of a target's devices, in a context.

  Args:
    devices: Devices of a target; () for those of this process.
  """
  if not devices:
    yield
    return
  before = jax.devices, jax.device_count, jax.make_mesh

  def make_mesh(*args: Any, **kwargs: Any) -> jax.sharding.Mesh:
    return before[-1](*args, **{"devices": devices} | kwargs)

  jax.devices = lambda *_, **__: list(devices)
  jax.device_count = lambda *_, **__: len(devices)
  jax.make_mesh = make_mesh
  try:
    yield
  finally:
    jax.devices, jax.device_count, jax.make_mesh = before


def _tpu(
  name: str, generation: str, topology: str, slices: str = "1"
) -> Target:
  """Returns a target of equal TPU slices, described by libtpu.

  ``generation`` is a key of `DEVICES`, ``topology`` the shape of a slice, such
  as 4x4x4, and ``slices`` their number.
  """
  if generation not in _TPUS:
    raise ValueError(
      f"--target={name}: the TPU generation {generation!r} is unknown; use one "
      f"of {', '.join(_TPUS)}"
    )
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", topology):
    raise ValueError(
      f"--target={name}: the topology {topology!r} must have the form of 4x4x4"
    )
  if not re.fullmatch(r"[1-9]\d{0,3}", slices):
    raise ValueError(
      f"--target={name}: the number of slices {slices!r} must be an integer "
      "from 1 to 9999"
    )
  refusal = SLICE_RULES[generation].refusal(
    [int(n) for n in topology.split("x")]
  )
  if refusal:
    raise ValueError(
      f"--target={name}: {generation} has no slice {topology}: {refusal}"
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError(
      f"--target={name} needs libtpu: pip install -e '.[tpu]' (no TPU needed)"
    )
  # libtpu reads the environment; without these variables it queries the
  # metadata server of Google Cloud and waits for a response.
  accelerator, chip = _TPUS[generation]
  os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": accelerator,
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
  }
  _wait_for_libtpu()
  try:
    description = topologies.get_topology_desc(
      platform="tpu",
      topology_name=f"{generation}:{topology}",
      chip_config_name=chip,
      num_slices=int(slices),
    )
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f"--target={name}: {str(error).splitlines()[0]}"
    ) from error
  hardware = DEVICES[generation]
  devices = tuple(description.devices)
  return Target(
    name,
    devices,
    hardware,
    # One level: the links of a slice form a single torus.
    (Level("slice", len(devices) // int(slices), hardware.link),),
  )


def _wait_for_libtpu() -> None:
  """Waits until no other process holds libtpu.

  libtpu can be loaded by one process at a time and aborts any other process
  that loads it, unless ALLOW_MULTIPLE_LIBTPU_LOAD is set.
  """
  if os.environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD"):
    return
  told = False
  while os.path.exists(_TPU_LOCK):
    try:
      # A shared lock succeeds only if no process holds libtpu's exclusive lock.
      # It is released immediately, since libtpu acquires the lock itself.
      with open(_TPU_LOCK) as lock:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return
    except (BlockingIOError, PermissionError):
      if not told:
        told = True
        print(
          f"waiting for another process to release libtpu ({_TPU_LOCK})",
          file=sys.stderr,
        )
      time.sleep(1)


# Properties of a GPU that XLA needs for compilation, in the text format of
# GpuTargetConfigProto. Sizes are in bytes, the clock is in GHz.
# Source: NVIDIA CUDA programming guide, table of compute capabilities.
_GPU_LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores} fpus_per_core: {fpus} memory_bandwidth: {bandwidth}
  l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
"""
_GPUS = {
  "a100": dict(major=8, minor=0, cores=108, fpus=64, l2=40 << 20, clock=1.41,
               shared=164 << 10, optin=163 << 10),
  "a100-pcie": dict(major=8, minor=0, cores=108, fpus=64, l2=40 << 20,
                    clock=1.41, shared=164 << 10, optin=163 << 10),
  "h100": dict(major=9, minor=0, cores=132, fpus=128, l2=50 << 20, clock=1.98,
               shared=228 << 10, optin=227 << 10),
  "h200": dict(major=9, minor=0, cores=132, fpus=128, l2=50 << 20, clock=1.98,
               shared=228 << 10, optin=227 << 10),
  "b200": dict(major=10, minor=0, cores=148, fpus=128, l2=126 << 20,
               clock=1.965, shared=228 << 10, optin=227 << 10),
}


def _gpu(name: str, gpu: str, shape: str) -> Target:
  """Returns a target of GPU nodes, described by a `GpuTargetConfigProto`.

  ``gpu`` is a key of `DEVICES`; ``shape`` is NODESxGPUS, with GPUs per node.
  """
  if gpu not in _GPUS:
    raise ValueError(
      f"--target={name}: the GPU {gpu!r} is unknown; use one of "
      f"{', '.join(_GPUS)}"
    )
  match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
  cluster = CLUSTERS[gpu]
  # GPUs per node, then nodes per group of each outer level.
  per_node, *others = (level.size for level in cluster.levels)
  if not match or int(match[2]) > per_node:
    raise ValueError(
      f"--target={name}: {shape!r} must be NODESxGPUS with at most {per_node} "
      "GPUs per node"
    )
  if int(match[1]) > math.prod(others):
    raise ValueError(
      f"--target={name} has too many nodes; {gpu} supports at most "
      f"{math.prod(others)}"
    )
  if importlib.util.find_spec("jax_cuda12_plugin") is None:
    raise ValueError(
      f"--target={name} needs the CUDA plugin: pip install -e '.[cuda]' "
      "(5.5 GB; no GPU needed)"
    )
  # The plugin searches for the CUDA driver and libraries and fails without
  # them, although compilation needs none.
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  nodes, gpus = int(match[1]), int(match[2])
  hardware = DEVICES[gpu]
  limits = _GPU_LIMITS.format(
    **_GPUS[gpu], bandwidth=int(hardware.memory_bandwidth),
    memory=hardware.memory_bytes,
  )
  config = (
    f"gpu_device_info {{ {limits} }} platform_name: \"CUDA\" "
    f"device_description_str: \"NVIDIA {gpu.upper()}\" "
    "dnn_version_info { major: 9 minor: 10 }"
  )
  try:
    description = topologies.get_topology_desc(
      platform="cuda",
      topology_name=gpu,
      target_config=config,
      topology=f"{nodes}x{gpus}x1",
    )
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f"--target={name}: {str(error).splitlines()[0]}"
    ) from error
  # A target may have fewer nodes or GPUs per node than the recorded cluster.
  levels = tuple(
    dataclasses.replace(level, size=size)
    for level, size in zip(cluster.levels, (gpus, nodes), strict=False)
  )
  assert math.prod(level.size for level in levels) == len(description.devices)
  return Target(name, tuple(description.devices), hardware, levels)
