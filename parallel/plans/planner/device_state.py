"""Training state of one device under a configuration, in closed form.

The tensors of `caatnet/models/transformer` are sharded over stages and tensor
ranks. `parallel.plans.zero.cost` computes their memory and collectives, and
`parallel.plans.outer.cost` their exchange between workers.
"""

import functools
import math

from parallel.plans.outer.cost import ParameterRows
from parallel.plans.planner.space import Configuration
from parallel.plans.workload import Transformer
from parallel.plans.zero import cost as zero_cost
from parallel.plans.zero.partition import Level, Partition

# Whether weights, gradients and optimizer state are sharded over data-parallel
# ranks (1) or replicated (0): depths of a `Partition` with one level.
_DEPTHS = {
  "ddp": (0, 0, 0), "zero1": (0, 0, 1), "zero2": (0, 1, 1), "zero3": (1, 1, 1)
}


def partition(configuration: Configuration) -> Partition:
  """Returns the ZeRO partition over the data-parallel ranks of a worker."""
  c = configuration
  return Partition(
    (Level("data", c.ranks),), *_DEPTHS[c.scheme],
    weight_codec=c.weight_codec, gradient_codec=c.gradient_codec,
  )


def parameters(
  configuration: Configuration, model: Transformer, moments: int = 2
) -> list[zero_cost.Parameter]:
  """Returns the sizes of a device's parameters, for `plans.zero.cost`.

  The optimizer has ``moments`` float32 arrays of each parameter's size.
  """
  c = configuration
  layers = c.chunks * model.layers_per_part(c.stages * c.chunks)
  # Partitions gather in the activations' dtype; ddp uses the float32 weights.
  wire = model.item_bytes if c.scheme != "ddp" else 4
  # Embedding and head are sharded over stages and tensor ranks.
  tables = math.ceil(model.vocab_size / (c.stages * c.tensor)) * model.width
  parameter = functools.partial(zero_cost.Parameter, moments=moments)
  return [
    *(parameter(math.ceil(size / c.tensor), layers, wire)
      for size in model.matrices),
    parameter(model.width, 2 * layers, 4),
    # The backward of an embedding lookup does not read the table.
    parameter(tables, 1, wire, regathered=0),
    parameter(tables, 1, wire),
    parameter(model.width, 1, 4),
  ]


def fragments(
  configuration: Configuration, model: Transformer
) -> list[list[ParameterRows]]:
  """Returns the fragments of an outer loop on a device.

  Returns:
    The rows of parameters of each fragment, as `parallel.plans.outer.cost`
    takes them. The last fragment holds the parameters outside the layers, or
    all of them if it is the only one.
  """
  c, sharding = configuration, partition(configuration)

  def of_layers(count: int) -> list[ParameterRows]:
    matrices = [
      ParameterRows(count, sharding.shard_size(math.ceil(size / c.tensor)))
      for size in model.matrices
    ]
    # Without a ZeRO partition, the norm gains of a fragment are one row, whose
    # codec blocks span layers.
    gains = ParameterRows(1, count * model.width)
    if sharding.optimizer:
      gains = ParameterRows(count, sharding.shard_size(model.width))
    return [*matrices, gains, gains]

  tables = math.ceil(model.vocab_size / (c.stages * c.tensor)) * model.width
  rest = [
    ParameterRows(2, sharding.shard_size(tables)),
    ParameterRows(1, sharding.shard_size(model.width))
  ]
  # Without layers per fragment, all parameters are exchanged at once.
  layers = c.outer.fragment_layers if c.outer else 0
  if not layers:
    here = c.chunks * model.layers_per_part(c.stages * c.chunks)
    return [[*of_layers(here), *rest]]
  # Each stage has an equal part of a fragment's layers.
  fragment = of_layers(layers // c.stages)
  return [*[fragment] * (model.num_layers // layers), rest]
