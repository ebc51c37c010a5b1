"""Devices to compile for without having them.

XLA compiles real code for a target: memory analysis, collectives and schedule
are what the machine would run. Nothing here says how fast.
"""

from collections.abc import Mapping
import dataclasses
import fcntl
import importlib.util
import math
import os
import re
import sys
import time

import jax
from jax.experimental import topologies

from parallel.hardware.clusters import CLUSTERS, Level
from parallel.hardware.devices import DEVICES, Device

SYNTAX = (
  "tpu:GENERATION:TOPOLOGY as in tpu:v5p:4x4x4, gpu:NAME:NODESxGPUS as in "
  "gpu:h200:1x8, or cpu:N"
)

# Generation -> (an accelerator type, which configuration of a chip), as libtpu
# wants them; "megacore" makes one device of a chip's two cores.
_TPUS = {
  "v4": ("v4-8", "megacore"),
  "v5e": ("v5litepod-4", "default"),
  "v5p": ("v5p-8", "megacore"),
  "v6e": ("v6e-4", "default"),
  "tpu7x": ("tpu7x-8", "default"),
}
_TPU_LOCK = "/tmp/libtpu_lockfile"


@dataclasses.dataclass(frozen=True)
class Target:
  """What to compile for.

  Attributes:
    name: As the user wrote it.
    devices: Descriptions that `jax.sharding.Mesh` takes.
    hardware: Of one device; None for CPUs, of which nothing is claimed.
    levels: What joins devices, innermost first; a TPU slice is one torus.
    compiler_options: What XLA needs to run reductions beside compute, as far
      as the platform can (LOG.md, "Reductions under compute").
  """

  name: str
  devices: tuple[jax.Device, ...]
  hardware: Device | None
  levels: tuple[Level, ...]
  compiler_options: Mapping[str, bool | str]


# Chosen by measurement: LOG.md, "Reductions under compute".
_SPARSE_CORE = {
  "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
  "xla_tpu_use_tc_device_shape_on_sc": "true",
}
_TPU_OPTIONS = {"v5p": _SPARSE_CORE, "v6e": _SPARSE_CORE}
_GPU_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}


def resolve(name: str) -> Target:
  """The devices that a target names.

  Args:
    name: See ``SYNTAX``.

  Returns:
    The target. For ``cpu:N`` the devices are this process's first N, which
    jax must have been told to have (``--cpu_devices``).

  Raises:
    ValueError: An unknown name, a topology that does not exist, or an extra
      that is not installed.
  """
  kind, *rest = name.split(":")
  if kind == "tpu" and len(rest) == 2:
    return _tpu(name, *rest)
  if kind == "gpu" and len(rest) == 2:
    return _gpu(name, *rest)
  if kind == "cpu" and len(rest) == 1 and re.fullmatch(r"[1-9]\d*", rest[0]):
    devices = tuple(jax.devices("cpu"))
    if len(devices) < int(rest[0]):
      raise ValueError(
        f"--target={name}: this process has {len(devices)} CPU devices; say "
        f"--cpu_devices={rest[0]}, too"
      )
    return Target(name, devices[: int(rest[0])], None, (), {})
  raise ValueError(f"--target={name!r} is not {SYNTAX}")


def _tpu(name: str, generation: str, topology: str) -> Target:
  if generation not in _TPUS:
    raise ValueError(
      f"--target={name}: no TPU generation {generation!r}; known: "
      f"{', '.join(_TPUS)}"
    )
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", topology):
    raise ValueError(
      f"--target={name}: {topology!r} is no topology; 4x4x4 is one"
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError(
      f"--target={name} needs libtpu: pip install -e '.[tpu]' (no TPU needed)"
    )
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
    (Level("slice", len(devices), hardware.link),),
    _TPU_OPTIONS.get(generation, {}),
  )


def _wait_for_libtpu() -> None:
  """One process at a time may load libtpu: it exits where another holds it."""
  told = False
  while os.path.exists(_TPU_LOCK):
    try:
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


# What XLA has to know of a GPU, beside its name: a GpuTargetConfigProto.
# Source: NVIDIA CUDA programming guide, table of compute capabilities.
_GPU_LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores} fpus_per_core: 128 memory_bandwidth: {bandwidth}
  l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
"""
_GPUS = {
  "a100": dict(major=8, minor=0, cores=108, l2=40 << 20, clock=1.41,
               shared=164 << 10, optin=163 << 10),
  "h100": dict(major=9, minor=0, cores=132, l2=50 << 20, clock=1.98,
               shared=228 << 10, optin=227 << 10),
  "h200": dict(major=9, minor=0, cores=132, l2=50 << 20, clock=1.98,
               shared=228 << 10, optin=227 << 10),
  "b200": dict(major=10, minor=0, cores=148, l2=126 << 20, clock=1.965,
               shared=228 << 10, optin=227 << 10),
}


def _gpu(name: str, gpu: str, shape: str) -> Target:
  if gpu not in _GPUS:
    raise ValueError(
      f"--target={name}: no GPU {gpu!r}; known: {', '.join(_GPUS)}"
    )
  match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
  cluster = CLUSTERS[gpu]
  per_node = cluster.levels[0].size
  if not match or int(match[2]) > per_node:
    raise ValueError(
      f"--target={name}: {shape!r} is not NODESxGPUS with at most {per_node} "
      "GPUs in a node"
    )
  if importlib.util.find_spec("jax_cuda12_plugin") is None:
    raise ValueError(
      f"--target={name} needs the CUDA plugin: pip install -e '.[cuda]' "
      "(5.5 GB; no GPU needed)"
    )
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
  nodes, gpus = int(match[1]), int(match[2])
  hardware = DEVICES[gpu]
  limits = _GPU_LIMITS.format(
    **_GPUS[gpu], bandwidth=int(hardware.memory_bandwidth),
    memory=hardware.memory_bytes,
  )
  config = (
    f"gpu_device_info {{ {limits} }} platform_name: \"CUDA\" "
    f"device_description_str: \"{gpu.upper()}\" "
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
  levels = (
    dataclasses.replace(cluster.levels[0], size=gpus),
    dataclasses.replace(cluster.levels[1], size=nodes),
  )
  assert math.prod(level.size for level in levels) == len(description.devices)
  return Target(
    name, tuple(description.devices), hardware, levels, _GPU_OPTIONS
  )
