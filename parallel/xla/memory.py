"""Memory per device of a compiled program, to the byte of XLA's own account."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device while the program runs.

  Attributes:
    arguments: Name -> bytes of each group of arguments, unpadded.
    padding: What their layout on the device adds.
    outputs: Results that do not take an argument's place.
    temporaries: Gradients, activations, copies.
    program: The code.
    host: Of the arguments, what is in the host's memory and not on the device.
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
    arguments: Name -> pytree of abstract arrays with shardings; together all
      arguments of the program.

  Returns:
    The bytes; their total is that of ``compiled.memory_analysis()``.
  """
  analysis = compiled.memory_analysis()
  sizes = {
    name: sum(map(_bytes_per_device, jax.tree.leaves(tree)))
    for name, tree in arguments.items()
  }
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


def _bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
  shape = x.sharding.shard_shape(x.shape)
  return math.prod(shape) * np.dtype(x.dtype).itemsize
