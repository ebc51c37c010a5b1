"""Memory per device of a compiled program; totals equal XLA's analysis."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
  """Bytes on one device while the program runs.

  Attributes:
    arguments: Name -> bytes of each group of arguments, without padding.
    padding: Bytes added by the layout of the arguments on the device.
    outputs: Bytes of results that do not reuse the memory of a donated
      argument.
    temporaries: Bytes of gradients, activations and copies in device memory.
    program: Bytes of the compiled code.
    host: Bytes of ``arguments`` and ``padding`` in host memory instead of
      device memory.
    host_temporaries: Bytes of offloaded activations in host memory.
    peak: Maximum bytes of device memory in use at one time, as XLA:TPU and
      XLA:GPU report it; None on CPUs, where the report has no temporaries.
  """

  arguments: dict[str, int]
  padding: int
  outputs: int
  temporaries: int
  program: int
  host: int = 0
  host_temporaries: int = 0
  peak: int | None = None

  @property
  def total(self) -> int:
    """Sum of the parts in device memory, an upper bound of ``peak``.

    XLA:TPU reports more temporaries than are in use at one time, so a program
    can compile although its total exceeds the device's memory.
    """
    return (
      sum(self.arguments.values()) + self.padding + self.outputs
      + self.temporaries + self.program - self.host
    )


def memory(
  compiled: jax.stages.Compiled, arguments: dict[str, Any]
) -> ProgramMemory:
  """Splits XLA's memory analysis by groups of arguments.

  Args:
    compiled: The compiled program.
    arguments: Name -> pytree of abstract arrays with shardings; together, all
      arguments of the program.

  Returns:
    The bytes of each part. Their total equals the total of
    ``compiled.memory_analysis()``.

  Example:
    >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    >>> x = jax.ShapeDtypeStruct([256], np.float32, sharding=one)
    >>> compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    >>> parts = memory(compiled, {"x": x})
    >>> parts.arguments, parts.padding, parts.outputs
    ({'x': 1024}, 0, 1024)
  """
  analysis = compiled.memory_analysis()
  sizes = {
    name: sum(map(bytes_per_device, jax.tree.leaves(tree)))
    for name, tree in arguments.items()
  }
  # Donated arguments are counted once, in ``arguments``: the outputs that alias
  # them are subtracted from ``outputs``.
  # XLA:TPU counts temporaries in host memory twice, here and as ``host_temp``.
  leaf = jax.tree.leaves(arguments)[0]
  platform = next(iter(leaf.sharding.device_set)).platform
  twice = analysis.host_temp_size_in_bytes if platform == "tpu" else 0
  # Ahead of time, GPUs list no memories, so jax drops the memory kinds of
  # arguments: all of them are in device memory of the program.
  host = analysis.host_argument_size_in_bytes
  # XLA reports one number for all arguments in their device layouts; the
  # difference to their logical sizes is padding.
  return ProgramMemory(
    arguments=sizes,
    padding=analysis.argument_size_in_bytes
    + analysis.host_argument_size_in_bytes
    - sum(sizes.values()),
    outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    temporaries=analysis.temp_size_in_bytes - twice,
    program=analysis.generated_code_size_in_bytes,
    host=host,
    host_temporaries=analysis.host_temp_size_in_bytes,
    # XLA's peak includes arguments in host memory, but not temporaries there.
    peak=None if platform == "cpu" else analysis.peak_memory_in_bytes - host,
  )


def bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
  """Returns the bytes of the shard of one device, without padding."""
  shape = x.sharding.shard_shape(x.shape)
  return math.prod(shape) * np.dtype(x.dtype).itemsize
