"""Check that a run's state fits into memory, before anything is allocated."""

import math
from typing import Any

import jax

from caatnet.train.experiment import Experiment
from parallel.base import available


def device_bytes(tree: Any, on_cpu: bool) -> int:
  """Returns the bytes of arrays in one device's own memory.

  Args:
    tree: Arrays, or their shapes, dtypes and shardings.
    on_cpu: Whether devices are CPUs, whose memory is also the host's.
  """
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if on_cpu or x.sharding.memory_kind in (None, "device")
  )


def check(experiment: Experiment) -> None:
  """Raises an error if training state and gradients exceed the memory.

  A run may need more memory: activations and temporaries are not counted.

  Raises:
    ValueError: The devices of this process cannot hold the run.
  """
  mesh, state = experiment.program.layout.mesh, experiment.abstract_state()
  device = mesh.local_devices[0]
  on_cpu = device.platform == "cpu"
  stored = device_bytes(state, on_cpu)
  gradients = device_bytes(state.params, on_cpu)
  needs, where = stored + gradients, f"a {device.device_kind}"
  if on_cpu:  # all devices of this process share the machine's memory
    needs *= len(mesh.local_devices)
    where, limit = "this machine", available.limit_bytes()
  else:
    limit = (device.memory_stats() or {}).get("bytes_limit", math.inf)
  if needs > limit:
    raise ValueError(
      f"the run needs at least {needs / 1e9:,.1f} GB of memory: a device has "
      f"{stored / 1e9:,.1f} GB of parameters, moments and outer state, and "
      f"{gradients / 1e9:,.1f} GB of gradients; {where} has "
      f"{limit / 1e9:,.1f} GB. Use a smaller config.model, or more devices "
      "(config.parallel, config.zero)"
    )
