"""``config.memory``: the memory that holds each part of the training state."""

from caatnet.schema.fields import COUNT_OR_ZERO, FRACTION, field, section

_KINDS = ("device", "pinned_host")
# Value of `Memory.activations` for the memory that `Memory.placement` plans.
FROM_PLACEMENT = "placement"


@section
class Memory:
  """Placement of tensors in memory of the device and of the host.

  Placements change results by rounding only: the host's optimizer adds numbers
  in another order than the device's, and a compiler may round a recomputed
  activation differently from a saved one. XLA:CPU has one memory, so
  "pinned_host" has no effect there. Each process has its own memory tiers.
  """

  moments: str = field(
    "device", "Memory of the inner optimizer's moments between steps: "
    '"device", or "pinned_host" (steps copy them to the device and back).',
    _KINDS,
  )
  activations: str = field(
    "device", "Memory of the activations that a layer saves for its backward: "
    '"device" or "pinned_host". Only named activations can be placed: the '
    "input of each layer, and those that config.model.remat selects; with "
    'remat="none" activations have no names. With "placement", the file that '
    "config.memory.placement names sets the fractions of layers that save what "
    "config.model.remat selects, or only their input, on device or host. "
    "Fractions are rounded down to quarters, thirds or halves, whichever "
    "divides the number of layers.", (*_KINDS, FROM_PLACEMENT),
  )
  optimizer: str = field(
    "device", 'Processor of the inner optimizer: "device", or "host" for '
    "AdamW on the CPU, with master weights and moments in config.memory.tiers. "
    "Each step copies gradients to the host and new weights to the device.",
    ("device", "host"),
  )
  tiers: tuple[tuple[str, float], ...] = field(
    (), "Memory tiers of the host's optimizer, each with the fraction of every "
    "array that it holds. A tier is the number of a NUMA node, or an existing "
    'folder, in which a file is memory-mapped, as in (("0", 0.5), '
    '("/mnt/disk", 0.5)). () for the first NUMA node, or for the tiers in '
    "the file that config.memory.placement names.", FRACTION,
  )
  placement: str = field(
    "", "Path of a file that launch.place --output has written, with the tiers "
    "of master weights, moments and gradients of the host's optimizer, and the "
    "activations that layers save with "
    'config.memory.activations="placement"; "" for none.'
  )
  policy: str = field(
    "latency_first", "Name of the policy whose placement the run executes, one "
    "of those in the file that config.memory.placement names. With "
    'config.memory.optimizer="host", its placement must update all parameters '
    "on the host."
  )
  threads: int = field(
    0, "Threads of the host's optimizer; 0 for one per core.", COUNT_OR_ZERO
  )
