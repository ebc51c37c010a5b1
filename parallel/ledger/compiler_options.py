"""XLA options for steps whose all-reduces overlap matrix products.

A platform's defaults leave all-reduces synchronous, or start them late. These
options are passed to the compiler with each step of training and inference,
and to `launch.compile`, which compiles for devices that are not present.
"""

from collections.abc import Mapping
import re

import jax

# Options that make all-reduces of XLA:TPU asynchronous, selected by compiling
# with and without them: log/2026-11-21-reductions-under-compute.md.
_SPARSE_CORE = {
  "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
  "xla_tpu_use_tc_device_shape_on_sc": True,
}
# XLA:TPU starts an all-reduce only as early as its estimated duration requires.
# The estimate is too short: log/2026-11-27-nanobatches-early.md and
# log/2026-11-27-nanobatches-v6e.md.
_EARLY_ALL_REDUCE = {"xla_tpu_sparse_core_all_reduce_latency_multiplier": "10"}
# `jax.Device.device_kind` -> (options of all steps, more for nano-batches).
_TPU = {
  "TPU v5": (_SPARSE_CORE, _EARLY_ALL_REDUCE),  # v5p
  "TPU v5p": (_SPARSE_CORE, _EARLY_ALL_REDUCE),
  "TPU v6 lite": (_SPARSE_CORE, _EARLY_ALL_REDUCE),  # v6e
  "TPU v6e": (_SPARSE_CORE, _EARLY_ALL_REDUCE),
}
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}


def of_device(
  device: jax.Device, in_pieces: bool = False
) -> dict[str, bool | str]:
  """Returns XLA option -> value for a step on devices; {} on CPUs.

  Args:
    device: One of the devices, or the description of one.
    in_pieces: Whether a batch is split into nano-batches, so that all-reduces
      of a nano-batch overlap with the compute of the next one.
  """
  if device.platform == "gpu":
    return dict(_GPU)
  always, early = _TPU.get(device.device_kind, ({}, {}))
  return always | early if in_pieces else dict(always)


def parse(text: str) -> Mapping[str, bool | str]:
  """Parses ``"NAME=VALUE NAME=VALUE"``; an empty VALUE removes an option.

  Raises:
    ValueError: A part is not xla_NAME=VALUE, or an option is given twice.

  Example:
    >>> parse("xla_gpu_enable_latency_hiding_scheduler=false xla_x=10")
    {'xla_gpu_enable_latency_hiding_scheduler': False, 'xla_x': '10'}
  """
  found: dict[str, bool | str] = {}
  for part in text.split():
    match = re.fullmatch(r"(xla_\w+)=(\S*)", part)
    if not match:
      raise ValueError(
        f"compiler option {part!r} must have the form xla_NAME=VALUE"
      )
    name, value = match.groups()
    if name in found:
      raise ValueError(f"compiler option {name} is given twice; give it once")
    # XLA accepts "true" as a string for TPUs only.
    found[name] = {"true": True, "false": False}.get(value, value)
  return found
