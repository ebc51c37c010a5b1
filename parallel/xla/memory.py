"""Memory per device of a compiled program, equal to XLA's own analysis."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device while the program runs.

  Attributes:
    arguments: Name -> bytes of each group of arguments, without padding.
    padding: Bytes that the layout of the arguments on the device adds.
    outputs: Results that are not written in place of a donated argument.
    temporaries: Gradients, activations and copies.
    program: The compiled code.
    host: The part of ``arguments`` and ``padding`` that lies in the host's
      memory and not on the device.
  """

  arguments: dict[str, int]
  padding: int
  outputs: int
  temporaries: int
  program: int
  host: int = 0

  @property
  def total(self) -> int:
    return (
      sum(self.arguments.values()) + self.padding + self.outputs
      + self.temporaries + self.program - self.host
    )


def memory(compiled: jax.stages.Compiled, arguments: dict[str, Any]) -> Memory:
  """Splits XLA's memory analysis by what the arguments are.

  Args:
    compiled: The program.
    arguments: Name -> pytree of abstract arrays with shardings. Together they
      are all arguments of the program.

  Returns:
    The bytes of each part. Their total is that of
    ``compiled.memory_analysis()``.
  """
  analysis = compiled.memory_analysis()
  sizes = {
    name: sum(map(bytes_per_device, jax.tree.leaves(tree)))
    for name, tree in arguments.items()
  }
  # XLA counts all arguments as one number, as they are laid out on the device:
  # what is left of it after the logical sizes is padding.
  return Memory(
    arguments=sizes,
    padding=analysis.argument_size_in_bytes
    + analysis.host_argument_size_in_bytes
    - sum(sizes.values()),
    outputs=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    temporaries=analysis.temp_size_in_bytes,
    program=analysis.generated_code_size_in_bytes,
    host=analysis.host_argument_size_in_bytes,
  )


def bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
  """Returns the bytes of one device's shard, without padding."""
  shape = x.sharding.shard_shape(x.shape)
  return math.prod(shape) * np.dtype(x.dtype).itemsize
